"""Where the servers of a training run: in threads of the ranks, or in processes of their own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lit_parallel.parameter_server.server import Server
from lit_parallel.parameter_server.wire import CurveKeys


class HostedServers:
    """The servers of a training: those that this rank runs, and where all are. Made and closed by all ranks.

    On one host they listen at sockets in a folder that only its owner may enter; across hosts at network addresses,
    with keys that the first rank makes and the process group hands out.

    Args:
        num_processes: How many server processes the first rank starts; None for a server thread in each rank.
        on_one_host: Whether all ranks are on one host.

    Raises:
        RuntimeError: A server process did not start; its own error message says why.
        ValueError: A server cannot listen.
    """

    def __init__(self, num_processes: int | None, *, on_one_host: bool) -> None:
        rank = dist.get_rank()
        shared: list[Any] = [None, None]
        if rank == 0:
            shared = [tempfile.mkdtemp(prefix="lit_parallel-"), None if on_one_host else CurveKeys.generate()]
        dist.broadcast_object_list(shared)
        self._folder, self.keys = shared
        self._processes: list[subprocess.Popen[str]] = []
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        here = f"ipc://{self._folder}/" if on_one_host else f"tcp://{_address()}:*"
        own: list[str] = []
        if num_processes is None:
            self._server = Server(f"{here}{rank}" if on_one_host else here, self.keys)
            self._thread = threading.Thread(target=self._server.run, name="parameter-server", daemon=True)
            self._thread.start()
            own = [self._server.endpoint]
        elif rank == 0:
            self._processes = [
                self._start(f"{here}{number}" if on_one_host else here) for number in range(num_processes)
            ]
            own = [process.stdout.readline().strip() for process in self._processes if process.stdout is not None]
            if not all(own):
                self.close()
                raise RuntimeError("A server process ended before it listened; its own error message says why.")
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        self.endpoints: list[str] = [endpoint for each in everywhere for endpoint in each]

    def close(self) -> None:
        """Ends this rank's servers."""
        if self._server is not None:
            self._server.close()
        if self._thread is not None:
            self._thread.join()
        for process in self._processes:
            process.communicate()  # ends its input, and so the server
        shutil.rmtree(self._folder, ignore_errors=True)  # by every rank: the first one may have been killed

    def _start(self, endpoint: str) -> subprocess.Popen[str]:
        """A server that ends when this process does, however that ends."""
        command = [sys.executable, "-m", "lit_parallel.parameter_server", "--bind", endpoint, "--end-with-input"]
        if self.keys is not None:
            file = Path(self._folder, "keys.json")  # in a folder that only its owner may enter
            file.write_text(self.keys.to_json())
            command += ["--keys", str(file)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603


def _address() -> str:
    """This host's address, as its name resolves."""
    return socket.gethostbyname(socket.gethostname())
