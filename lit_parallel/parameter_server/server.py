"""A server: receives pushes and pulls, and answers each pull when the store lets it proceed."""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import zmq
import zmq.auth.thread
from torch import Tensor

from lit_parallel.parameter_server.shared_weights import ELEMENT_WISE
from lit_parallel.parameter_server.store import OptimizerUpdate, RefusedError, Store, check_staleness
from lit_parallel.parameter_server.wire import (
    DTYPES,
    CurveKeys,
    copy_into,
    decode_header,
    encode,
    integer,
    integers,
    pack_state,
    unpack_state,
)

log = logging.getLogger(__name__)
_POLL_MILLISECONDS = 100
#: A worker whose beats, one a second, stay away for so long is taken for dead.
_SILENCE_SECONDS = 5.0
#: Larger frames end the connection that brings them.
_MAX_FRAME_BYTES = 1 << 31
_MAX_WORKERS = 1 << 16
#: Senders whose refusal is logged, once each.
_MAX_LOGGED = 100


class Server:
    """Serves one shard until it is closed; `run` blocks.

    Messages of a worker, each a header and frames of tensor bytes:

    - init: what the server holds from now on (keys, values, staleness, number of workers, optimizer). Answered.
    - push: gradients and the worker's clock. Answered only where it is refused.
    - pull: answered with version, staleness and values, once the store lets it proceed.
    - leave, enter: nobody waits for the worker in between. Answered.
    - state, load: the optimizer's state. Answered.
    - ping: answered at once; beat: not answered, says that the worker lives.

    Whatever cannot be carried out is refused, with an answer that says why, and changes nothing.

    Args:
        endpoint: Where to listen: "ipc://file" or "tcp://address:port"; port * is any free one.
        keys: With them only workers that have them are heard, and messages are encrypted.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._closed = threading.Event()
        self._authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._admit_only(keys)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            self._free()
            raise ValueError(f"A server cannot listen at {endpoint}: {error}.") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._store: Store | None = None
        self._update: OptimizerUpdate | None = None
        self._parked: dict[int, bytes] = {}  # worker: where its pull came from
        self._pushed: dict[int, list[Tensor]] = {}  # by worker: memory for gradients
        self._pulled: dict[int, list[Tensor]] = {}  # by worker: memory for answers
        self._heard: dict[int, float] = {}  # when each worker was heard last
        self._refused: set[bytes] = set()

    def run(self) -> None:
        """Serves until `close` is called, from another thread."""
        try:
            while not self._closed.is_set():
                if self._socket.poll(_POLL_MILLISECONDS):
                    self._serve_one()
                self._release_from_the_dead()
        finally:
            self._free()

    def close(self) -> None:
        """Makes `run` return soon."""
        self._closed.set()

    def _release_from_the_dead(self) -> None:
        """Nobody waits for a worker that is not heard any more."""
        now = time.monotonic()
        silent = [worker for worker, heard in self._heard.items() if now - heard > _SILENCE_SECONDS]
        if silent and self._parked:
            for receiver in self._parked.values():
                text = (
                    f"worker {silent[0]} has not been heard for {_SILENCE_SECONDS:.0f} seconds; it has ended or failed"
                )
                self._answer(receiver, {"error": text})
            self._parked.clear()

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
        try:
            if not frames:
                raise RefusedError("the message is empty")
            header = decode_header(frames[0])
            handler = self._handlers.get(header.get("op", "")) if isinstance(header.get("op", ""), str) else None
            if handler is None:
                raise RefusedError(f"'op' must be one of {', '.join(self._handlers)}")
            handler(self, sender.bytes, header, frames[1:])
        except RefusedError as error:
            if sender.bytes not in self._refused and len(self._refused) < _MAX_LOGGED:
                self._refused.add(sender.bytes)
                log.warning("%s: refused a message: %s", self.endpoint, error)
            self._answer(sender.bytes, {"error": str(error)})

    def _answer(
        self, receiver: bytes, header: dict[str, Any], tensors: Sequence[Tensor] = (), *, copy: bool = True
    ) -> None:
        self._socket.send_multipart([receiver, *encode(header, tensors)], copy=copy)

    def _open_store(self) -> Store:
        if self._store is None:
            raise RefusedError("the server has no values yet: send init first")
        return self._store

    def _init(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        lengths, num_workers = header.get("lengths"), integer(header, "num_workers")
        staleness = math.inf if header.get("staleness") == "inf" else header.get("staleness")
        dtypes = header.get("dtypes")
        if (
            not isinstance(lengths, list)
            or not isinstance(dtypes, list)
            or not len(lengths) == len(dtypes) == len(frames)
        ):
            raise RefusedError("'lengths', 'dtypes' and the frames must be lists of one length")
        if not 0 < num_workers <= _MAX_WORKERS:
            raise RefusedError(f"'num_workers' must be from 1 to {_MAX_WORKERS}")
        with _refusing():
            check_staleness(staleness)  # type: ignore[arg-type]
            # Checked by the bytes that came, before memory is taken.
            values = []
            for length, dtype, frame in zip(lengths, dtypes, frames, strict=True):
                if type(length) is not int or len(frame) != length * DTYPES[dtype].itemsize:
                    raise RefusedError(f"a frame has {len(frame)} bytes for {length} elements of {dtype}")
                values.append(torch.empty(length, dtype=DTYPES[dtype]))
                copy_into(values[-1], frame)
            optimizer = header.get("optimizer")
            if optimizer is not None and optimizer["name"] not in {each.__name__ for each in ELEMENT_WISE}:
                raise RefusedError(f"there is no element-wise optimizer {optimizer['name']!r}")
            update = None if optimizer is None else OptimizerUpdate(values, optimizer["name"], optimizer["groups"])
        self._store = Store(values, num_workers, staleness, update)  # type: ignore[arg-type]
        self._update = update
        self._parked.clear()
        self._pushed, self._pulled = {}, {}
        self._heard = dict.fromkeys(self._store.clocks, time.monotonic())
        self._answer(sender, {"op": "init"})

    def _push(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        store, keys, options = self._open_store(), integers(header, "keys"), header.get("options", [])
        if len(keys) != len(frames) or not all(0 <= key < len(store.values) for key in keys):
            raise RefusedError(f"{len(frames)} frames for the keys {keys}; there are keys 0 to {len(store.values) - 1}")
        if self._update is not None:
            self._update.check(options)
        worker, clock = integer(header, "worker"), integer(header, "clock")
        if store.is_new(worker, clock):
            # What the worker has pushed before is in: it could not have pulled else.
            memory = self._memory_of(self._pushed, worker)
            for key, frame in zip(keys, frames, strict=True):
                copy_into(memory[key], frame)
            store.push(worker, clock, {key: memory[key] for key in keys}, options)
        self._answer_parked()

    def _leave(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        self._open_store().leave(integer(header, "worker"))
        self._answer_parked()
        self._answer(sender, {"op": "leave"})

    def _enter(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        self._open_store().enter(integer(header, "worker"))
        self._answer(sender, {"op": "enter"})

    def _answer_parked(self) -> None:
        store = self._open_store()
        for worker in [worker for worker in self._parked if store.may_pull(worker)]:
            self._answer_pull(worker, self._parked.pop(worker))

    def _pull(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        store, worker = self._open_store(), integer(header, "worker")
        if worker not in self._heard:
            raise RefusedError(f"there is no worker {worker}")
        if store.may_pull(worker):
            self._answer_pull(worker, sender)
        else:
            self._parked[worker] = sender

    def _answer_pull(self, worker: int, receiver: bytes) -> None:
        store = self._open_store()
        pull, keys = store.pull(worker), sorted(store.present)
        answer = {"op": "pull", "version": pull.version, "staleness": pull.staleness, "keys": keys}
        # Copied, since the next push changes the values while these are on their way. What the worker has pulled
        # before has arrived: it would not pull again else.
        memory = self._memory_of(self._pulled, worker)
        for key in keys:
            memory[key].copy_(store.values[key])
        self._answer(receiver, answer, [memory[key] for key in keys], copy=False)

    def _memory_of(self, kind: dict[int, list[Tensor]], worker: int) -> list[Tensor]:
        """A worker's tensors, like the values, kept: memory touched for the first time costs more than a copy."""
        if worker not in kind:
            kind[worker] = [torch.empty_like(value) for value in self._open_store().values]
        return kind[worker]

    def _state(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        self._open_store()
        update = self._update
        states = [] if update is None else [update.optimizer.state[each] for each in update.parameters]
        plain, vectors = pack_state(states)
        self._answer(sender, {"op": "state", "state": plain}, vectors)

    def _load(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        self._open_store()
        if self._update is None:
            raise RefusedError("this server has no optimizer")
        with _refusing():
            states = unpack_state(header["state"], frames)
            if len(states) != len(self._update.parameters):
                raise RefusedError(f"there are {len(self._update.parameters)} keys, not {len(states)}")
            optimizer = self._update.optimizer
            loaded = {number: state for number, state in enumerate(states) if state}
            optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})
        self._answer(sender, {"op": "load"})

    def _beat(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        worker = integer(header, "worker")
        if worker in self._heard:
            self._heard[worker] = time.monotonic()

    def _ping(self, sender: bytes, header: dict[str, Any], frames: list[zmq.Frame]) -> None:
        self._answer(sender, {"op": "ping"})

    _handlers = {  # noqa: RUF012
        "init": _init,
        "push": _push,
        "pull": _pull,
        "leave": _leave,
        "enter": _enter,
        "state": _state,
        "load": _load,
        "ping": _ping,
        "beat": _beat,
    }


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What fails because of a message's contents is the sender's fault, and must not end the server."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
