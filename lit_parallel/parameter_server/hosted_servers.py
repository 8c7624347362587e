"""Where the servers of a training run: in threads of the ranks, or in processes of their own."""

from __future__ import annotations

import fcntl
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from lit_parallel.parameter_server.server import Server
from lit_parallel.parameter_server.wire import CurveKeys

log = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5
#: Between two starts of a server.
_RESTART_SECONDS = 5.0


class HostedServers:
    """The servers of a training: those that this rank runs, and where all are. Made and closed by all ranks.

    On one host they listen at sockets in a folder that only its owner may enter; across hosts at network addresses,
    with keys that the first rank makes and the process group hands out.

    Args:
        num_processes: How many server processes the first rank starts; None for a server thread in each rank.
        on_one_host: Whether all ranks are on one host.
        main_address: Of the first rank's host.
        survives: Whether a server that has ended is started again from its snapshot, by the first rank and as a
            process; servers in ranks only on one host.

    Raises:
        RuntimeError: A server process did not start; its own error message says why.
        ValueError: A server cannot listen.
    """

    def __init__(
        self, num_processes: int | None, *, on_one_host: bool, main_address: str = "localhost", survives: bool = False
    ) -> None:
        rank = dist.get_rank()
        shared: list[Any] = [None, None]
        if rank == 0:
            shared = [tempfile.mkdtemp(prefix="lit_parallel-"), None if on_one_host else CurveKeys.generate()]
        dist.broadcast_object_list(shared)
        self._folder, self.keys = shared
        self._rank, self._survives = rank, survives
        self._lock = _lock(self._folder, rank, "x")
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._server: Server | None = None
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        here = f"ipc://{self._folder}/" if on_one_host else f"tcp://{_address_towards(main_address)}:*"
        own: list[str] = []
        if num_processes is None:
            self._server = Server(f"{here}{rank}" if on_one_host else here, self.keys, self._snapshot(rank))
            self._start_thread(self._server.run, "parameter-server")
            own = [self._server.endpoint]
        elif rank == 0:
            self._processes = {
                number: self._start(number, f"{here}{number}" if on_one_host else here)
                for number in range(num_processes)
            }
            own = [_address_of(process) for process in self._processes.values()]
            if not all(own):
                self.close()
                raise RuntimeError("A server process ended before it listened; its own error message says why.")
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        self.endpoints: list[str] = [endpoint for each in everywhere for endpoint in each]
        if rank == 0 and survives:
            self._start_thread(self._watch, "parameter-server-watch")

    @property
    def processes(self) -> list[int]:
        """The server processes that this rank has started."""
        return [process.pid for process in self._processes.values()]

    def close(self, *, failed: bool = False) -> None:
        """Ends this rank's servers.

        Args:
            failed: The others may go on without this rank, and need its server again.
        """
        if not failed:
            Path(self._folder, f"{self._rank}.lock").unlink(missing_ok=True)
        self._closed.set()
        if self._server is not None:
            self._server.close()
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            process.communicate()  # ends its input, and so the server
        # By the first rank, or by others if that was killed.
        if self._rank == 0 or self._has_left(0):
            shutil.rmtree(self._folder, ignore_errors=True)  # others may remove their sockets meanwhile
        if self._lock is not None:
            self._lock.close()

    def _start(self, number: int, endpoint: str) -> subprocess.Popen[str]:
        """A server that ends when this process does, however that ends."""
        command = [sys.executable, "-m", "lit_parallel.parameter_server", "--bind", endpoint, "--end-with-input"]
        if self.keys is not None:
            file = Path(self._folder, "keys.json")  # in a folder that only its owner may enter
            file.write_text(self.keys.to_json())
            command += ["--keys", str(file)]
        if (snapshot := self._snapshot(number)) is not None:
            command += ["--snapshot", str(snapshot)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def _snapshot(self, number: int) -> Path | None:
        return Path(self._folder, f"{number}.snapshot") if self._survives else None

    def _watch(self) -> None:
        """On the first rank: starts servers again that have ended."""
        started = dict.fromkeys(self._processes, time.monotonic())
        while not self._closed.wait(_WATCH_SECONDS):
            for number in range(len(self.endpoints)):
                if not self._has_ended(number) or time.monotonic() - started.get(number, 0) < _RESTART_SECONDS:
                    continue
                log.warning("Server %d has ended; it is started again from its snapshot.", number)
                if number in self._processes:
                    self._processes[number].communicate()
                self._processes[number] = self._start(number, self.endpoints[number])
                _address_of(self._processes[number])
                started[number] = time.monotonic()

    def _has_ended(self, number: int) -> bool:
        if number in self._processes:
            return self._processes[number].poll() is not None
        return number > 0 and self._has_left(number)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of this host has ended without closing in order."""
        if (lock := _lock(self._folder, rank, "r+")) is None:
            return False
        lock.close()
        return True

    def _start_thread(self, target: Any, name: str) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()


def _lock(folder: str, rank: int, mode: str) -> IO[str] | None:
    """A lock that a rank holds as long as it lives; None if it does, or has closed in order."""
    try:
        file = open(Path(folder, f"{rank}.lock"), mode)  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        file.close()
        return None
    return file


def _address_of(server: subprocess.Popen[str]) -> str:
    """What a server process prints once it listens; "" if it has ended before."""
    assert server.stdout is not None
    return server.stdout.readline().strip()


def _address_towards(host: str) -> str:
    """This host's address in the network in which another host is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
