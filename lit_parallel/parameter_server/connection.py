"""A worker's conversation with one server, which may end and be started again in the middle of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq
from torch import Tensor

from lit_parallel.parameter_server.partition import Piece
from lit_parallel.parameter_server.wire import CurveKeys, decode_header, encode
from lit_parallel.transports import TransportError

log = logging.getLogger(__name__)
#: A server that answers nothing for so long, not even a ping, is taken for dead.
_SILENCE_SECONDS = 5.0
#: How long to wait for it to be started again.
_COMEBACK_SECONDS = 60.0
_PING_SECONDS = 1.0

#: Header and frames.
Answer: TypeAlias = "tuple[dict[str, Any], list[zmq.Frame]]"


class RefusalError(TransportError):
    """A server has refused a message."""


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
    """A socket to a server."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, int(1000 * _SILENCE_SECONDS))
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.worker_public.encode(), keys.worker_secret.encode()
    socket.connect(address)
    return socket


class Connection:
    """Questions to one server, and its answers.

    Every question has a number, and every answer tells whose it is and which server process it comes from. When that
    is another one than before, the worker introduces itself, and says again what has not been answered.

    Args:
        socket: To the server.
        address: Of the server.
        pieces: That it holds, by number of the key.
        introduce: Tells a server that was started again what it must know of this worker.
        check_hope: As in `Client`.

    Attributes:
        is_shared: Whether the server has mapped this worker's segment.
        pending: What to say again.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        pieces: tuple[Piece, ...],
        introduce: Callable[[Connection], None],
        check_hope: Callable[[], None] | None,
    ) -> None:
        self.socket, self.address, self.pieces = socket, address, pieces
        self._introduce, self._check_hope = introduce, check_hope
        self.is_shared = False
        self.pending: list[Callable[[], None]] = []
        self._server: str | None = None  # the process that has answered last
        self._number = 0  # of the last question
        self._first = 0  # answers to questions before this one come too late

    def send(self, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Sends a message."""
        self._number += 1
        self.socket.send_multipart(encode({**header, "ask": self._number}, tensors), copy=not tensors)

    def say(self, send: Callable[[], None]) -> None:
        """Calls a function that sends a message, now and whenever it has to be sent again."""
        self.pending.append(send)
        try:
            send()
        except zmq.Again as error:
            if self._check_hope is None:
                raise self._silent(_SILENCE_SECONDS) from error

    def hear(self) -> Answer:
        """The answer to the last question; a server may wait for slower workers, but must answer pings meanwhile.

        Raises:
            RefusalError: The server has refused something.
            TransportError: The server does not answer.
        """
        heard, is_missed = time.monotonic(), False
        while True:
            silence = time.monotonic() - heard
            if self.socket.poll(int(1000 * _PING_SECONDS)):
                first, *frames = self.socket.recv_multipart(copy=False)
                header, heard, is_missed = decode_header(first), time.monotonic(), False
                if header["server"] != self._server:
                    if self._server is not None:
                        self._say_again()
                        continue
                    self._server = header["server"]
                if "error" in header and header["ask"] >= self._first:
                    self.pending.clear()
                    raise RefusalError(f"The server at {self.address}: {header['error']}.")
                if header["ask"] == self._number:
                    self.pending.clear()
                    return header, frames
            elif silence > (_SILENCE_SECONDS if self._check_hope is None else _COMEBACK_SECONDS):
                raise self._silent(silence)
            else:
                if self._check_hope is not None and silence > _SILENCE_SECONDS:
                    self._check_hope()
                    if not is_missed:
                        is_missed = True
                        log.warning("%s Waiting for it to be started again.", self._silent(silence))
                with contextlib.suppress(zmq.Again):
                    self.socket.send_multipart(encode({"op": "ping"}), zmq.NOBLOCK)

    def _say_again(self) -> None:
        if self._check_hope is None:
            raise TransportError(
                f"The server at {self.address} has been started again; workers that move in step cannot go on from an"
                " older version of the weights. Resume training from a checkpoint."
            )
        log.warning("The server at %s has been started again; going on with it.", self.address)
        self._server, self._first = None, self._number + 1
        self._introduce(self)
        for say in self.pending:
            say()

    def _silent(self, seconds: float) -> TransportError:
        return TransportError(
            f"The server at {self.address} has not answered for {seconds:.0f} seconds; it has ended, cannot be reached,"
            " or has other keys."
        )
