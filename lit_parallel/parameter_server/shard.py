"""What a server does with the messages of workers about the values it holds."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from lit_parallel.parameter_server.optimizer_state import ELEMENT_WISE
from lit_parallel.parameter_server.optimizer_update import OptimizerUpdate
from lit_parallel.parameter_server.segment import map_pieces
from lit_parallel.parameter_server.store import RefusedError, Store, check_staleness
from lit_parallel.parameter_server.wire import (
    DTYPES,
    copy_into,
    integer,
    integers,
    number,
    pack_state,
    unpack_state,
)

log = logging.getLogger(__name__)
_MAX_WORKERS = 1 << 16

#: Sends an answer to a message: the message's sender, its header, the answer and tensors.
Answer = Callable[["Request", dict[str, Any], Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Request:
    """A message of a worker."""

    sender: bytes
    header: dict[str, Any]
    frames: list[zmq.Frame]


@dataclass(slots=True)
class _Memory:
    """A worker's tensors, like the values, kept: memory touched for the first time costs more than a copy.

    Attributes:
        pushed: Gradients.
        pulled: Values on their way to the worker.
        seen: Where workers do not move in step: the values when this one pulled last.
        is_shared: Whether the worker reads and writes them itself.
        parts: Keys whose gradients came before the push of this clock.
    """

    pushed: list[Tensor]
    pulled: list[Tensor]
    seen: list[Tensor] = field(default_factory=list)
    is_shared: bool = False
    parts: tuple[int, set[int]] = field(default_factory=lambda: (0, set()))


class Shard:
    """The values of one server.

    Handles these messages of a worker, each a header and frames of tensor bytes:

    - init: what the server holds from now on (keys, values, staleness, number of workers, optimizer). Answered.
    - enter, leave: from now on others wait for the worker, or no longer do. Answered, enter with the worker's clock.
    - share: where the worker's memory is; with it, gradients and values are not in messages. Answered.
    - part: gradients of some keys, ahead of the push.
    - push: the worker's clock, and the gradients that have not come yet.
    - norm: answered when the gradients of all workers of a clock are in, with the sum of squares of their mean.
    - release: by how much to multiply that mean before the update.
    - pull: answered with version, staleness and values, once the store lets it proceed.
    - state, load: the optimizer's state. Answered.

    Whatever cannot be carried out is refused and changes nothing.

    Args:
        answer: Sends answers.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._store: Store | None = None
        self._update: OptimizerUpdate | None = None
        self._spec: dict[str, Any] | None = None  # of the optimizer, as it came
        self._num_workers, self._evicts = 0, False
        self._lives: dict[int, int] = {}  # by worker: how often it was started
        self._strangers: set[int] = set()  # workers that do not know that this server has been started again
        self._parked: dict[int, Request] = {}  # pulls, by worker
        self._parked_norms: list[Request] = []
        self._memory: dict[int, _Memory] = {}

    @property
    def version(self) -> int:
        """Updates applied; -1 where there are no values yet."""
        return -1 if self._store is None else self._store.version

    @property
    def awaited(self) -> Collection[int]:
        """The workers that others wait for."""
        return () if self._store is None else self._store.clocks

    def handle(self, request: Request) -> None:
        """Carries out a message.

        Raises:
            RefusedError: It cannot be carried out.
        """
        operation = request.header.get("op", "")
        handler = self._handlers.get(operation) if isinstance(operation, str) else None
        if handler is None:
            raise RefusedError(f"'op' must be one of {', '.join(self._handlers)}")
        worker = request.header.get("worker")
        if type(worker) is int and worker in self._strangers:
            if operation in ("part", "push", "pull"):
                return  # it will say that again
            self._strangers.discard(worker)
        handler(self, request)

    def give_up(self, worker: int, silence: float) -> None:
        """Goes on without a worker, or tells those who wait that they wait in vain."""
        store = self._open_store()
        if self._evicts:
            log.warning("worker %d has not been heard for %.0f seconds; the others go on without it", worker, silence)
            store.leave(worker)
            self._answer_parked()
            return
        error = f"worker {worker} has not been heard for {silence:.0f} seconds; it has ended or failed"
        for request in (*self._parked.values(), *self._parked_norms):
            self._answer(request, {"error": error}, ())
        self._parked.clear()
        self._parked_norms.clear()

    def snapshot(self) -> dict[str, Any]:
        """All that a server needs to go on from here."""
        store = self._open_store()
        return {
            "values": store.values,
            "version": store.version,
            "clocks": store.clocks,
            "present": sorted(store.present),
            "staleness": store.staleness,
            "num_workers": self._num_workers,
            "evicts": self._evicts,
            "lives": self._lives,
            "optimizer": self._spec,
            "state": None if self._update is None else self._update.state_dicts(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from there."""
        self._spec, self._evicts, self._lives = snapshot["optimizer"], snapshot["evicts"], snapshot["lives"]
        store = self._make_store(snapshot["values"], snapshot["num_workers"], snapshot["staleness"])
        store.version, store.clocks, store.present = (
            snapshot["version"],
            snapshot["clocks"],
            set(snapshot["present"]),
        )
        if self._update is not None:
            self._update.load_state_dicts(snapshot["state"])
        self._strangers = set(range(self._num_workers))

    def _make_store(self, values: list[Tensor], num_workers: int, staleness: float) -> Store:
        spec, self._num_workers = self._spec, num_workers
        num_optimizers = 1 if staleness == 0 else num_workers
        self._update = None if spec is None else OptimizerUpdate(values, spec["name"], spec["groups"], num_optimizers)
        if self._store is None or list(map(_layout, self._store.values)) != list(map(_layout, values)):
            self._memory = {}
        for memory in self._memory.values():
            memory.seen = []
        self._store = Store(values, num_workers, staleness, self._update)
        self._parked.clear()
        self._parked_norms.clear()
        return self._store

    def _open_store(self) -> Store:
        if self._store is None:
            raise RefusedError("the server has no values yet: send init first")
        return self._store

    def _worker(self, request: Request) -> int:
        worker = integer(request.header, "worker")
        if not 0 <= worker < self._num_workers:
            raise RefusedError(f"there is no worker {worker}")
        life, known = integer(request.header, "life"), self._lives.get(worker, 0)
        if life < known:
            raise RefusedError(f"worker {worker} was taken for dead, and has been started again meanwhile")
        return worker

    def _init(self, request: Request) -> None:
        header, frames = request.header, request.frames
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
            if optimizer is not None:
                OptimizerUpdate(values, optimizer["name"], optimizer["groups"], 1)  # fails before anything is changed
        self._spec, self._evicts, self._lives = optimizer, header.get("evicts") is True, {}
        self._make_store(values, num_workers, staleness)  # type: ignore[arg-type]
        self._answer(request, {}, ())

    def _share(self, request: Request) -> None:
        worker, store = self._worker(request), self._open_store()
        with _refusing():
            pid, descriptor = integer(request.header, "pid"), integer(request.header, "descriptor")
            gradients, weights = map_pieces(pid, descriptor, request.header["offsets"], store.values)
        self._memory[worker] = _Memory(gradients, weights, is_shared=True)
        self._answer(request, {}, ())

    def _enter(self, request: Request) -> None:
        worker = self._worker(request)
        clock = self._open_store().enter(worker, integer(request.header, "clock"))
        self._lives[worker] = integer(request.header, "life")
        self._answer(request, {"clock": clock}, ())

    def _leave(self, request: Request) -> None:
        self._open_store().leave(self._worker(request))
        self._answer_parked()
        self._answer(request, {}, ())

    def _part(self, request: Request) -> None:
        worker, clock, keys = self._receive_gradients(request)
        memory = self._memory_of(worker)
        earlier = memory.parts[1] if memory.parts[0] == clock else set()
        memory.parts = (clock, earlier | keys)

    def _push(self, request: Request) -> None:
        store, options = self._open_store(), request.header.get("options", [])
        if self._update is not None:
            self._update.check(options)
        worker, clock, sent = self._receive_gradients(request)
        memory, keys = self._memory_of(worker), integers(request.header, "keys")
        self._check_keys(keys)
        known = sent | (memory.parts[1] if memory.parts[0] == clock else set())
        if not memory.is_shared and not known.issuperset(keys):
            raise RefusedError(f"the gradients of the keys {sorted(set(keys) - known)} have not come")
        hold = request.header.get("hold") is True
        store.push(worker, clock, {key: memory.pushed[key] for key in keys}, options, hold=hold)
        self._answer_parked()

    def _receive_gradients(self, request: Request) -> tuple[int, int, set[int]]:
        """The worker, its clock, and the keys whose gradients are in the message; they are kept if they are new."""
        store, sent = self._open_store(), integers(request.header, "sent")
        if len(sent) != len(request.frames):
            raise RefusedError(f"{len(request.frames)} frames for the keys {sent}")
        self._check_keys(sent)
        worker, clock = self._worker(request), integer(request.header, "clock")
        # What the worker has pushed before is in: it could not have pulled else.
        if store.is_new(worker, clock):
            memory = self._memory_of(worker)
            for key, frame in zip(sent, request.frames, strict=True):
                copy_into(memory.pushed[key], frame)
        return worker, clock, set(sent)

    def _check_keys(self, keys: list[int]) -> None:
        number_of_keys = len(self._open_store().values)
        if not all(0 <= key < number_of_keys for key in keys):
            raise RefusedError(f"there are keys 0 to {number_of_keys - 1}, not all of {keys}")

    def _norm(self, request: Request) -> None:
        self._open_store()
        integer(request.header, "clock")
        self._parked_norms.append(request)
        self._answer_parked()

    def _release(self, request: Request) -> None:
        scale = number(request.header, "scale")
        self._open_store().release(integer(request.header, "version"), scale)
        self._answer_parked()

    def _pull(self, request: Request) -> None:
        self._open_store()
        self._parked[self._worker(request)] = request
        self._answer_parked()

    def _answer_parked(self) -> None:
        store = self._open_store()
        norm, parked, self._parked_norms = store.norm, self._parked_norms, []
        for request in parked:
            if integer(request.header, "clock") <= norm.clock:
                self._answer(request, {"square": norm.square, "version": norm.version}, ())
            else:
                self._parked_norms.append(request)
        for worker in [worker for worker in self._parked if store.may_pull(worker)]:
            self._answer_pull(worker, self._parked.pop(worker))

    def _answer_pull(self, worker: int, request: Request) -> None:
        store, memory = self._open_store(), self._memory_of(worker)
        pull, keys = store.pull(worker), sorted(store.present)
        # Copied, since the next push changes the values while these are on their way. What the worker has pulled
        # before has arrived: it would not pull again else.
        for key in keys:
            memory.pulled[key].copy_(store.values[key])
        if self._update is not None and store.staleness > 0:
            self._look_ahead(memory, is_in=worker in store.clocks)
        answer = {"version": pull.version, "staleness": pull.staleness, "keys": keys}
        self._answer(request, answer, [] if memory.is_shared else [memory.pulled[key] for key in keys])

    def _look_ahead(self, memory: _Memory, *, is_in: bool) -> None:
        """Hands out where values are likely to be when the worker's next gradients arrive.

        Until then the other workers will have pushed, and momentum repeats what they have done since this one's last
        pull (Hakimi et al. 2019). Who has left gets the values as they are.
        """
        store, update = self._open_store(), self._update
        assert update is not None
        if not memory.seen:
            memory.seen = [value.clone() for value in store.values]
        others = 1 - 1 / max(1, len(store.clocks))
        for key, momentum in update.momentum().items():
            if momentum > 0:
                value, seen = store.values[key], memory.seen[key]
                if is_in:
                    memory.pulled[key].add_(value - seen, alpha=momentum * others)
                seen.copy_(value)

    def _memory_of(self, worker: int) -> _Memory:
        if worker not in self._memory:
            pushed, pulled = ([torch.empty_like(value) for value in self._open_store().values] for _ in range(2))
            self._memory[worker] = _Memory(pushed, pulled)
        return self._memory[worker]

    def _state(self, request: Request) -> None:
        self._open_store()
        update = self._update
        states = [] if update is None else update.state()
        plain, vectors = pack_state(states)
        self._answer(request, {"state": plain}, vectors)

    def _load(self, request: Request) -> None:
        self._open_store()
        if self._update is None:
            raise RefusedError("this server has no optimizer")
        with _refusing():
            self._update.load_state(unpack_state(request.header["state"], request.frames))
        self._answer(request, {}, ())

    _handlers = {  # noqa: RUF012
        "init": _init,
        "enter": _enter,
        "leave": _leave,
        "share": _share,
        "part": _part,
        "push": _push,
        "norm": _norm,
        "release": _release,
        "pull": _pull,
        "state": _state,
        "load": _load,
    }


def _layout(value: Tensor) -> tuple[int, torch.dtype]:
    return len(value), value.dtype


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What fails because of a message's contents is the sender's fault, and must not end the server."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OSError, OverflowError) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
