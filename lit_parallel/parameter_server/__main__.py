"""A server by hand: `python -m lit_parallel.parameter_server --bind tcp://*:5555 --keys keys.json`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from lit_parallel.parameter_server.server import Server
from lit_parallel.parameter_server.wire import CurveKeys


def main() -> None:
    """Serves one shard of a training until interrupted; the first line printed is the address."""
    parser = argparse.ArgumentParser(prog="python -m lit_parallel.parameter_server", description=main.__doc__)
    parser.add_argument("--bind", help="where to listen: tcp://address:port (port * is any free one) or ipc://file")
    parser.add_argument(
        "--keys", type=Path, help="file of --make-keys; needed with tcp, the same for workers and servers"
    )
    parser.add_argument(
        "--make-keys", type=Path, metavar="FILE", help="write new keys, for their owner's eyes only; end"
    )
    parser.add_argument("--snapshot", type=Path, help="file to keep what is held in, and to go on from if it exists")
    parser.add_argument("--end-with-input", action="store_true", help="end when standard input does")
    flags = parser.parse_args()
    if flags.make_keys is not None:
        descriptor = os.open(flags.make_keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(CurveKeys.generate().to_json())
        return
    if flags.bind is None:
        parser.error("--bind says where to listen")
    if flags.bind.startswith("tcp:") and flags.keys is None:
        parser.error("a server on the network needs --keys; --make-keys makes them")
    try:
        keys = None if flags.keys is None else CurveKeys.from_json(flags.keys.read_text())
        server = Server(flags.bind, keys, flags.snapshot)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(server.endpoint, flush=True)

    def wait_for_end_of_input() -> None:
        sys.stdin.read()
        server.close()

    if flags.end_with_input:
        threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    try:
        server.run()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
