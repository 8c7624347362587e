"""What a server holds, and which pull may proceed. No messages here: see `server`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: Takes the gradients of some keys (by number), and the options of each parameter group, and changes the values.
Update = Callable[[Mapping[int, Tensor], list[dict[str, object]]], None]


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


class Store:
    """The values of one server and the clock of each worker.

    A worker's clock counts its pushes since it entered; all W workers are in from the start. A pull may proceed while
    the worker is at most `staleness` pushes ahead of the slowest one (stale synchronous parallel, Ho et al. 2013).
    With 0 all workers move in step: their gradients are averaged, in the order of their ranks, and applied as one
    update. Otherwise each push is an update of its own, with 1/W of its gradient, so that W pushes go as far as their
    average would; `math.inf` is fully asynchronous.

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

    def is_new(self, worker: int, clock: int) -> bool:
        """Whether a push has not been counted yet.

        Raises:
            RefusedError: There is no such worker, or a push before this one is missing.
        """
        if worker not in self.clocks:
            raise RefusedError(f"there is no worker {worker}")
        if clock > self.clocks[worker] + 1:
            raise RefusedError(f"worker {worker} is at clock {self.clocks[worker]}; {clock} cannot follow")
        return clock > self.clocks[worker]

    def push(self, worker: int, clock: int, gradients: Mapping[int, Tensor], options: list[dict[str, object]]) -> bool:
        """Counts a worker's gradients once, however often they come.

        Args:
            worker: Its rank.
            clock: 1 for its first push, and so on.
            gradients: By number of the key; keys without a gradient are left out. They are the store's from now on,
                until the worker may pull, and are changed.
            options: Of each parameter group, for this update.

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
            for gradient in gradients.values():
                gradient.div_(self._num_workers)
            self._apply(gradients, options)
        else:
            self._waiting[worker], self._options = dict(gradients), options
            self._apply_when_complete()
        return True

    def leave(self, worker: int) -> None:
        """Nobody waits for the worker any more, until it enters again.

        In step, those that stay still divide by all: who has left counts as zeros, as in DDP's join.
        """
        self.clocks.pop(worker, None)
        if self._waiting:
            self._apply_when_complete()

    def enter(self, worker: int) -> None:
        """Takes the worker in, with its clock at 0; all enter together, when all have left.

        Raises:
            RefusedError: There is no such worker.
        """
        if not 0 <= worker < self._num_workers:
            raise RefusedError(f"there is no worker {worker}")
        self.clocks[worker] = 0

    def may_pull(self, worker: int) -> bool:
        """Whether the worker's pull may proceed now."""
        return self._staleness_of(worker) <= self.staleness

    def pull(self, worker: int) -> Pull:
        """What to tell with the values; only where `may_pull`."""
        return Pull(self.version, self._staleness_of(worker))

    def _staleness_of(self, worker: int) -> int:
        return self.clocks[worker] - min(self.clocks.values()) if worker in self.clocks else 0

    def _apply_when_complete(self) -> None:
        if len(self._waiting) >= len(self.clocks):
            self._apply(self._mean(), self._options)
            self._waiting.clear()

    def _mean(self) -> dict[int, Tensor]:
        """As all-reduce does it: a worker without a gradient counts as zeros, a key without any has none."""
        mean: dict[int, Tensor] = {}
        for worker in sorted(self._waiting):
            for key, gradient in self._waiting[worker].items():
                mean[key] = mean[key].add_(gradient) if key in mean else gradient
        for total in mean.values():
            total.div_(self._num_workers)
        return mean

    def _apply(self, gradients: Mapping[int, Tensor], options: list[dict[str, object]]) -> None:
        if self._update is not None:
            self._update(gradients, options)
        else:
            self.present = set(gradients)
            for key, gradient in gradients.items():
                self.values[key].copy_(gradient)
        self.version += 1


def check_staleness(staleness: float) -> None:
    """Raises `ValueError` unless this is a number of pushes, or infinite."""
    if not (staleness >= 0 and (math.isinf(staleness) or staleness == int(staleness))):
        raise ValueError(f"staleness={staleness} is not a number of pushes: use 0, 1, 2, ... or math.inf.")


class OptimizerUpdate:
    """A torch optimizer on the values of one server.

    Args:
        values: As the store's.
        name: Of an element-wise class of `torch.optim`.
        groups: For each parameter group its options, and the numbers of its keys under "keys".
    """

    def __init__(self, values: list[Tensor], name: str, groups: list[dict[str, object]]) -> None:
        self.parameters = [torch.nn.Parameter(value) for value in values]
        by_group = [
            {**{key: value for key, value in group.items() if key != "keys"}, "params": self._of(group["keys"])}
            for group in groups
        ]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(by_group)

    def __call__(self, gradients: Mapping[int, Tensor], options: list[dict[str, object]]) -> None:
        """As `Update` says."""
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            group.update(changed)
        for key, parameter in enumerate(self.parameters):
            parameter.grad = gradients.get(key)
        self.optimizer.step()

    def check(self, options: object) -> None:
        """Makes sure that options can be applied, before anything is.

        Raises:
            RefusedError: They are not those of the optimizer's groups.
        """
        groups = self.optimizer.param_groups
        if not isinstance(options, list) or len(options) != len(groups):
            raise RefusedError(f"'options' must be a list of {len(groups)} groups")
        for group, changed in zip(groups, options, strict=True):
            if not isinstance(changed, dict):
                raise RefusedError("the options of a group must be an object")
            for name, value in changed.items():
                if name == "params" or name not in group or not _is_like(value, group[name]):
                    raise RefusedError(f"the optimizer cannot have the option {name}={value!r}")

    def _of(self, keys: object) -> list[torch.nn.Parameter]:
        assert isinstance(keys, list)
        return [self.parameters[key] for key in keys]


def _is_like(value: object, known: object) -> bool:
    """Whether a value from a message is of the same kind as the one that is known."""
    if isinstance(known, (list, tuple)):
        return isinstance(value, list) and len(value) == len(known) and all(map(_is_like, value, known))
    if value is None or known is None:  # switches of the implementation, such as `foreach`
        return value is None or isinstance(value, (bool, str))
    return isinstance(value, type(known)) or (isinstance(value, (int, float)) and isinstance(known, (int, float)))
