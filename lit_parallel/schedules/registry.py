"""The only list of algorithms. The Trainer's names, the recipes, tests, benchmarks and docs are made from it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from lit_parallel.schedules.central import central
from lit_parallel.schedules.double_ring import double_ring
from lit_parallel.schedules.halving_doubling import halving_doubling
from lit_parallel.schedules.ring import ring
from lit_parallel.schedules.schedule import Schedule
from lit_parallel.schedules.sharded import sharded
from lit_parallel.schedules.tree import tree
from lit_parallel.schedules.verify import verify

MakeSchedule = Callable[[int], Schedule]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A synchronous algorithm under the name by which `Trainer(strategy=...)` knows it.

    Attributes:
        name: The strategy's name.
        make_schedule: Returns the algorithm's schedule for a world size.
    """

    name: str
    make_schedule: MakeSchedule


_ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("allreduce", central),
        Algorithm("ring", ring),
        Algorithm("double_ring", double_ring),
        Algorithm("tree", tree),
        Algorithm("halving_doubling", halving_doubling),
        Algorithm("ps", sharded),
    )
}


def available_algorithms() -> tuple[str, ...]:
    """The names of all registered algorithms, in the order of registration."""
    return tuple(_ALGORITHMS)


def get_algorithm(name: str) -> Algorithm:
    """Looks an algorithm up.

    Raises:
        ValueError: No such name; the message lists the valid ones.
    """
    if name not in _ALGORITHMS:
        close = difflib.get_close_matches(name, _ALGORITHMS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"Unknown algorithm {name!r}; available: {', '.join(_ALGORITHMS)}.{hint}")
    return _ALGORITHMS[name]


def add_algorithm(name: str, make_schedule: MakeSchedule) -> Algorithm:
    """Adds an algorithm after proving it for 1 to 8 ranks. `lit_parallel.register_algorithm` is what users call.

    Raises:
        ValueError: The name is taken or is no lower-case identifier.
        ScheduleError: The proof failed.
    """
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"An algorithm's name must be a lower-case identifier such as 'my_ring', not {name!r}.")
    if name in _ALGORITHMS:
        raise ValueError(f"An algorithm named {name!r} is already registered; choose another name.")
    for world_size in range(1, 9):
        verify(make_schedule(world_size))
    _ALGORITHMS[name] = algorithm = Algorithm(name, make_schedule)
    return algorithm
