"""A server: receives messages, hears who lives, and keeps snapshots; see `shard` for what messages do."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
import zmq.auth.thread
from torch import Tensor

from lit_parallel.parameter_server.shard import Request, Shard
from lit_parallel.parameter_server.store import RefusedError
from lit_parallel.parameter_server.wire import CurveKeys, decode_header, encode, integer
from lit_parallel.transports import Traffic

log = logging.getLogger(__name__)
_POLL_MILLISECONDS = 100
#: A worker whose beats, one a second, stay away for so long is taken for dead.
_SILENCE_SECONDS = 5.0
_SNAPSHOT_SECONDS = 5.0
#: Larger frames end the connection that brings them.
_MAX_FRAME_BYTES = 1 << 31
#: Senders whose refusal is logged, once each.
_MAX_LOGGED = 100


class Server:
    """Serves one shard until it is closed; `run` blocks.

    Besides the messages of `Shard` there are these: ping, answered at once; beat, not answered, says that the worker
    lives. Whatever cannot be carried out is refused, with an answer that says why, and changes nothing. Every answer
    says which question it belongs to, and which server process it comes from.

    Args:
        endpoint: Where to listen: "ipc://file" or "tcp://address:port"; port * is any free one.
        keys: With them only workers that have them are heard, and messages are encrypted.
        snapshot: A file for what is held, written every few seconds. If it exists, the server goes on from there.

    Raises:
        ValueError: It cannot listen there, or the snapshot cannot be read.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None, snapshot: Path | None = None) -> None:
        self._context = zmq.Context()
        self._closed = threading.Event()
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        #: What has come and gone in messages; tensors in memory that is shared with workers do not count.
        self.traffic = Traffic()
        self._shard = Shard(self._answer)
        self._identity = secrets.token_hex(8)
        self._heard: dict[int, float] = {}  # when each worker was heard last
        self._refused: set[bytes] = set()
        self._snapshot, self._saved_version, self._saved_at = snapshot, -1, 0.0
        try:
            if snapshot is not None and snapshot.exists():
                self._shard.restore(torch.load(snapshot, weights_only=True))
            if keys is not None:
                self._admit_only(keys)
            self._socket.bind(endpoint)
        except (zmq.ZMQError, OSError, KeyError, RuntimeError) as error:
            self.close()
            self._free()
            raise ValueError(f"A server cannot listen at {endpoint}: {error}.") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serves until `close` is called, from another thread."""
        try:
            while not self._closed.is_set():
                if self._socket.poll(_POLL_MILLISECONDS):
                    self._serve_one()
                self._look_for_the_dead()
                if time.monotonic() - self._saved_at > _SNAPSHOT_SECONDS:
                    self._save()
        finally:
            self._free()

    def close(self) -> None:
        """Makes `run` return soon."""
        self._closed.set()

    def _look_for_the_dead(self) -> None:
        now = time.monotonic()
        for worker in list(self._shard.awaited):
            if now - self._heard.setdefault(worker, now) > _SILENCE_SECONDS:
                self._shard.give_up(worker, _SILENCE_SECONDS)

    def _save(self) -> None:
        """Replaces the snapshot by a newer one, if there is any."""
        self._saved_at = time.monotonic()
        if self._snapshot is not None and self._shard.version != self._saved_version:
            self._saved_version = self._shard.version
            new = self._snapshot.with_suffix(".new")
            torch.save(self._shard.snapshot(), new)
            os.replace(new, self._snapshot)

    def _admit_only(self, keys: CurveKeys) -> None:
        class Provider:
            def callback(self, domain: str, key: bytes) -> bool:
                return hmac.compare_digest(key, keys.worker_public.encode())

        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=Provider())
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.server_public.encode()
        self._socket.curve_secretkey = keys.server_secret.encode()

    def _free(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _serve_one(self) -> None:
        sender, *frames = self._socket.recv_multipart(copy=False)
        self.traffic.messages_received += 1
        self.traffic.bytes_received += sum(map(len, frames))
        request = Request(sender.bytes, {}, frames[1:])
        try:
            if not frames:
                raise RefusedError("the message is empty")
            request = Request(sender.bytes, decode_header(frames[0]), frames[1:])
            self._handle(request)
        except RefusedError as error:
            if sender.bytes not in self._refused and len(self._refused) < _MAX_LOGGED:
                self._refused.add(sender.bytes)
                log.warning("%s: refused a message: %s", self.endpoint, error)
            self._answer(request, {"error": str(error)})

    def _handle(self, request: Request) -> None:
        operation = request.header.get("op")
        if operation == "ping":
            self._answer(request, {})
        elif operation == "beat":
            worker = integer(request.header, "worker")
            if worker in self._shard.awaited:
                self._heard[worker] = time.monotonic()
        else:
            self._shard.handle(request)
            if operation == "init":
                self._saved_version = -1
                self._save()
            elif operation == "enter":
                self._heard[request.header["worker"]] = time.monotonic()

    def _answer(self, request: Request, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        ask = request.header.get("ask")
        whole = {"server": self._identity, "ask": ask if type(ask) is int else 0, **header}
        frames = encode(whole, tensors)
        self.traffic.messages_sent += 1
        self.traffic.bytes_sent += len(frames[0]) + sum(each.nbytes for each in tensors)
        self._socket.send_multipart([request.sender, *frames], copy=not tensors)
