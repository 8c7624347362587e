"""What a server holds, and which pull may proceed. No messages here: see `server`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lit_parallel.parameter_server.average import average_into

#: Takes a worker, its gradients of some keys (by number), and the options of each parameter group, and changes the
#: values. For the mean of all workers' gradients the worker is 0.
Update = Callable[[int, Mapping[int, Tensor], list[dict[str, object]]], None]


class RefusedError(ValueError):
    """A request that the store does not carry out; it has changed nothing."""


@dataclass(frozen=True, slots=True)
class Pull:
    """What a worker is told with the values.

    Attributes:
        version: Updates applied so far.
        staleness: The worker's clock minus the slowest worker's.
    """

    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class HeldNorm:
    """The norm of a mean gradient that was held, or still is.

    Attributes:
        clock: Of the workers that pushed it.
        square: Sum of squares, in float64.
        version: Of the store at that time.
    """

    clock: int
    square: float
    version: int


class Store:
    """The values of one server and the clock of each worker.

    A worker's clock counts its pushes; all W workers are in from the start. A pull may proceed while
    the worker is at most `staleness` pushes ahead of the slowest one (stale synchronous parallel, Ho et al. 2013).
    With 0 all workers move in step: their gradients are averaged, in the order of their ranks, and applied as one
    update. Otherwise each push is an update of its own; `math.inf` is fully asynchronous.

    Args:
        values: One vector per key; changed in place by `update`.
        num_workers: W.
        staleness: The bound.
        update: Applies gradients; None makes the values the mean gradients themselves, for workers that update.
    """

    def __init__(self, values: list[Tensor], num_workers: int, staleness: float, update: Update | None) -> None:
        self.values, self.staleness, self.version = values, staleness, 0
        self.present: set[int] = set(range(len(values)))  # without `update`: the keys that had a gradient
        self.clocks = dict.fromkeys(range(num_workers), 0)
        self._num_workers, self._update = num_workers, update
        self._waiting: dict[int, dict[int, Tensor]] = {}  # gradients of the workers that have pushed, in step
        self._options: list[dict[str, object]] = []  # for their update
        self._hold = False
        self._held: dict[int, Tensor] | None = None
        self.norm = HeldNorm(0, 0.0, 0)

    def is_new(self, worker: int, clock: int) -> bool:
        """Whether a push has not been counted yet.

        Raises:
            RefusedError: The worker is not in, or a push before this one is missing.
        """
        if worker not in self.clocks:
            raise RefusedError(f"worker {worker} is not in: it has left, or was taken for dead")
        if clock > self.clocks[worker] + 1:
            raise RefusedError(f"worker {worker} is at clock {self.clocks[worker]}; {clock} cannot follow")
        return clock > self.clocks[worker]

    def push(
        self,
        worker: int,
        clock: int,
        gradients: Mapping[int, Tensor],
        options: list[dict[str, object]],
        *,
        hold: bool = False,
    ) -> bool:
        """Counts a worker's gradients once, however often they come.

        Args:
            worker: Its rank.
            clock: 1 for its first push, and so on.
            gradients: By number of the key; keys without a gradient are left out. They are the store's from now on,
                until the worker may pull, and are changed.
            options: Of each parameter group, for this update.
            hold: In step: when all are in, set `norm`, and wait for `release` before the update.

        Returns:
            Whether they are new.

        Raises:
            RefusedError: Unknown worker or key, wrong length or type, or a push before this one is missing.
        """
        is_new = self.is_new(worker, clock)
        for key, gradient in gradients.items():
            if not 0 <= key < len(self.values):
                raise RefusedError(f"there is no key {key}")
            value = self.values[key]
            if gradient.shape != value.shape or gradient.dtype != value.dtype:
                raise RefusedError(f"key {key} has {len(value)} elements of {value.dtype}")
        if not is_new:
            return False
        self.clocks[worker] = clock
        if self.staleness > 0:
            self._apply(worker, gradients, options)
        else:
            self._waiting[worker], self._options, self._hold = dict(gradients), options, hold
            self._apply_when_complete()
        return True

    def release(self, version: int, scale: float) -> None:
        """Applies the held mean gradient times `scale`, once: only while the store is at `version`."""
        if self._held is not None and version == self.version:
            held, self._held = self._held, None
            for gradient in held.values():
                gradient.mul_(scale)
            self._apply(0, held, self._options)

    def leave(self, worker: int) -> None:
        """Nobody waits for the worker any more, until it enters again.

        In step, those that stay still divide by all: who has left counts as zeros, as in DDP's join.
        """
        self.clocks.pop(worker, None)
        if self._waiting:
            self._apply_when_complete()

    def enter(self, worker: int, clock: int) -> int:
        """Takes the worker in, or once more.

        Args:
            worker: Its rank.
            clock: Its own; all enter with the same one when all had left.

        Returns:
            Its clock from now on: not behind the slowest one, so that nobody has to wait for who comes late.

        Raises:
            RefusedError: There is no such worker.
        """
        if not 0 <= worker < self._num_workers:
            raise RefusedError(f"there is no worker {worker}")
        known = self.clocks[worker] if worker in self.clocks else min(self.clocks.values(), default=0)
        self.clocks[worker] = max(clock, known)
        return self.clocks[worker]

    def may_pull(self, worker: int) -> bool:
        """Whether the worker's pull may proceed now."""
        return self._held is None and self._staleness_of(worker) <= self.staleness

    def pull(self, worker: int) -> Pull:
        """What to tell with the values; only where `may_pull`."""
        return Pull(self.version, self._staleness_of(worker))

    def _staleness_of(self, worker: int) -> int:
        return self.clocks[worker] - min(self.clocks.values()) if worker in self.clocks else 0

    def _apply_when_complete(self) -> None:
        if len(self._waiting) >= len(self.clocks):
            mean = self._mean()
            self._waiting.clear()
            if self._hold:
                self._held = mean
                square = sum(each.double().square().sum().item() for each in mean.values())
                self.norm = HeldNorm(max(self.clocks.values(), default=0), square, self.version)
            else:
                self._apply(0, mean, self._options)

    def _mean(self) -> dict[int, Tensor]:
        """As all-reduce does it: a worker without a gradient counts as zeros, a key without any has none."""
        by_key: dict[int, list[Tensor]] = {}
        for worker in sorted(self._waiting):
            for key, gradient in self._waiting[worker].items():
                by_key.setdefault(key, []).append(gradient)
        for first, *rest in by_key.values():
            average_into(first, rest, self._num_workers)
        return {key: first for key, (first, *_) in by_key.items()}

    def _apply(self, worker: int, gradients: Mapping[int, Tensor], options: list[dict[str, object]]) -> None:
        if self._update is not None:
            self._update(worker, gradients, options)
        else:
            self.present = set(gradients)
            for key, gradient in gradients.items():
                self.values[key].copy_(gradient)
        self.version += 1


def check_staleness(staleness: float) -> None:
    """Raises `ValueError` unless this is a number of pushes, or infinite."""
    if not (staleness >= 0 and (math.isinf(staleness) or staleness == int(staleness))):
        raise ValueError(f"staleness={staleness} is not a number of pushes: use 0, 1, 2, ... or math.inf.")
