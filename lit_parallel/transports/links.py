"""Connections between the ranks of one host: signals, file descriptors, and news of a peer's end. Nothing has a name.

Every pair of ranks shares an eventfd in each direction for signals, a socket for messages with file descriptors, and
a socket that carries nothing: its end of file tells that the peer has ended. Signals are system calls, so what was
written to shared memory before a signal is seen after it on every processor, whatever its memory ordering.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lit_parallel.transports.transport import TransportError

_TOKEN_BYTES = 32
#: Tries, each followed by giving up the processor, before a waiting rank blocks. More would only keep the core from
#: a peer where ranks outnumber cores.
_SPINS = 100
#: What a peer sends on its otherwise empty socket when it closes in order.
_GOODBYE = b"closed"


class OtherHostError(RuntimeError):
    """The ranks are not all on one host, or cannot pass file descriptors to each other."""


class Links:
    """This rank's connections to all others. Making them is collective over the default process group.

    Args:
        timeout: How long a wait may last.

    Raises:
        OtherHostError: On all ranks alike, with the reason.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout.total_seconds()
        self._sockets: dict[int, socket.socket] = {}
        self._lives: dict[int, socket.socket] = {}
        self._incoming: dict[int, int] = {}
        self._outgoing: dict[int, int] = {}
        self._received = [0] * self.world_size
        self._polls: dict[int, select.poll] = {}
        self._closed: set[int] = set()
        if not hasattr(os, "eventfd"):
            raise OtherHostError("shared memory between ranks needs Linux")
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        _ALL_LINKS.add(self)

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return sorted(self._sockets)

    def signal(self, peer: int) -> None:
        """Sends one signal."""
        os.eventfd_write(self._outgoing[peer], 1)

    def wait(self, peer: int, count: int) -> None:
        """Blocks until a peer has sent `count` signals in all.

        Raises:
            TransportError: A peer has ended, or the time is over.
        """
        if self._received[peer] >= count:
            return
        incoming = self._incoming[peer]
        for _ in range(_SPINS):
            try:
                self._received[peer] += os.eventfd_read(incoming)
            except BlockingIOError:
                os.sched_yield()
            else:
                if self._received[peer] >= count:
                    return
        deadline = time.monotonic() + self._timeout
        while self._received[peer] < count:
            self._block(peer, incoming, deadline)
            try:
                self._received[peer] += os.eventfd_read(incoming)
            except BlockingIOError:
                # News, but no signal: only now, since a peer may end right after its last signal.
                self._check_alive(peer)

    def send(self, peer: int, message: bytes, descriptors: list[int]) -> None:
        """Sends a message with file descriptors."""
        try:
            socket.send_fds(self._sockets[peer], [message], descriptors)
        except OSError as error:
            raise self._lost(peer) from error

    def receive(self, peer: int, num_bytes: int) -> tuple[bytes, list[int]]:
        """Blocks for a message of at most `num_bytes`, with up to two file descriptors.

        Raises:
            TransportError: A peer has ended, or the time is over.
        """
        deadline = time.monotonic() + self._timeout
        self._block(peer, self._sockets[peer].fileno(), deadline)
        try:
            message, descriptors, _, _ = socket.recv_fds(self._sockets[peer], num_bytes, 2)
        except OSError as error:
            raise self._lost(peer) from error
        if not message:
            raise self._lost(peer)
        return message, descriptors

    def hang_up(self) -> None:
        """Tells all peers that this rank leaves; waits of theirs and of this process end with an error."""
        for life in self._lives.values():
            try:
                life.send(_GOODBYE)
                life.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the peer left first

    def close(self) -> None:
        """Closes everything. No other thread may be waiting; `hang_up` wakes it."""
        self.hang_up()
        for each in (*self._sockets.values(), *self._lives.values()):
            each.close()
        for descriptor in (*self._incoming.values(), *self._outgoing.values()):
            os.close(descriptor)
        for connections in (self._sockets, self._lives, self._incoming, self._outgoing, self._polls):
            connections.clear()

    def _connect(self) -> None:
        """Connects every pair, each rank to the lower ones, and exchanges what the pair shares."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # A name in Linux's abstract namespace is no file: it goes with the socket.
            listener.bind(b"\0lit_parallel-" + secrets.token_hex(16).encode())
            listener.listen(self.world_size)
            listener.settimeout(self._timeout)
            addresses = _gather((listener.getsockname(), token))
            tokens = [each for _, each in addresses]
            problem = ""
            for peer in range(self.rank):
                self._sockets[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    connection.connect(addresses[peer][0])
                    connection.send(tokens[peer] + bytes([0]) + self.rank.to_bytes(4, "big"))
                except OSError as error:
                    problem = f"rank {self.rank} cannot reach rank {peer} ({error})"
            agree(problem, OtherHostError)
            while len(self._sockets) < self.world_size - 1:
                connection, _ = listener.accept()
                greeting = connection.recv(_TOKEN_BYTES + 5)
                if greeting[:_TOKEN_BYTES] == token:
                    self._sockets[int.from_bytes(greeting[-4:], "big")] = connection
                else:
                    connection.close()  # a stranger

        for peer, connection in self._sockets.items():
            self._incoming[peer] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            segment = os.memfd_create("lit_parallel")
            os.write(segment, token)
            self._lives[peer], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # Of the two pairs that the ranks make, the lower rank's is used.
            socket.send_fds(connection, [b"!"], [segment, self._incoming[peer], theirs.fileno()])
            os.close(segment)
            theirs.close()
        problem = ""
        for peer, connection in self._sockets.items():
            _, (segment, outgoing, life), _, _ = socket.recv_fds(connection, 1, 3)
            self._outgoing[peer] = outgoing
            other = socket.socket(fileno=life)
            if peer < self.rank:
                self._lives[peer].close()
                self._lives[peer] = other
            else:
                other.close()
            if os.pread(segment, _TOKEN_BYTES, 0) != tokens[peer]:
                problem = f"rank {self.rank} does not see rank {peer}'s memory"
            os.close(segment)
        agree(problem, OtherHostError)

    def _block(self, peer: int, descriptor: int, deadline: float) -> None:
        """Blocks until a descriptor can be read or a peer has ended."""
        if descriptor not in self._polls:
            self._polls[descriptor] = select.poll()
            self._polls[descriptor].register(descriptor, select.POLLIN)
            for other, life in self._lives.items():
                if other not in self._closed:
                    self._polls[descriptor].register(life, select.POLLIN)
        events = self._polls[descriptor].poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            raise TransportError(f"Rank {self.rank} waited {self._timeout:.0f} seconds for rank {peer} in vain.")
        if all(ready != descriptor for ready, _ in events):
            self._check_alive(peer)

    def _check_alive(self, awaited: int) -> None:
        """Raises if the awaited peer has left, or any peer has ended without closing."""
        for peer, life in self._lives.items():
            if peer in self._closed:
                continue
            try:
                news = life.recv(len(_GOODBYE), socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                news = b""
            if news != _GOODBYE:
                raise self._lost(peer)
            self._closed.add(peer)
            self._polls.clear()
        if awaited in self._closed:
            raise self._lost(awaited)

    def _lost(self, peer: int) -> TransportError:
        return TransportError(
            f"Rank {self.rank} lost contact with rank {peer}: that process has ended or failed; its own error message"
            " says why."
        )


_ALL_LINKS: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    """A child of a rank (a data loader's worker) must not keep the rank's sockets open after the rank was killed."""
    for links in _ALL_LINKS:
        for each in (*links._sockets.values(), *links._lives.values()):
            each.close()


os.register_at_fork(after_in_child=_close_in_child)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(problem: str, error: type[RuntimeError]) -> None:
    """Raises the error on all ranks if any of them has a problem; collective over the default process group."""
    problems = [each for each in _gather(problem) if each]
    if problems:
        raise error("; ".join(sorted(set(problems))))
