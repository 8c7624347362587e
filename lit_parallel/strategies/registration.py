"""Making algorithms known to Lightning under the names that `Trainer(strategy=...)` takes."""

from __future__ import annotations

import math
from functools import partial

from lightning.pytorch.strategies import StrategyRegistry

from lit_parallel.schedules import registry
from lit_parallel.strategies.data_parallel import DataParallelStrategy
from lit_parallel.strategies.parameter_server import ParameterServerStrategy
from lit_parallel.strategies.push_pull import PushPullStrategy
from lit_parallel.strategies.single import SingleStrategy
from lit_parallel.strategies.synchronous import (
    AlgorithmStrategy,
    AllReduceStrategy,
    DoubleRingStrategy,
    HalvingDoublingStrategy,
    RingStrategy,
    SynchronousStrategy,
    TreeStrategy,
)

_NAMED_STRATEGIES: dict[str, type[SynchronousStrategy]] = {
    strategy.algorithm: strategy
    for strategy in (
        AllReduceStrategy,
        RingStrategy,
        DoubleRingStrategy,
        TreeStrategy,
        HalvingDoublingStrategy,
        ParameterServerStrategy,
    )
}
#: Strategies of workers at their own pace, and how many pushes they may be ahead unless told otherwise.
PUSH_PULL_STALENESS = {"ps_async": math.inf, "ps_ssp": 4}
#: As Lightning names the variants of "ddp".
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register_algorithm(name: str, make_schedule: registry.MakeSchedule) -> None:
    """Makes an algorithm of your own a strategy: `Trainer(strategy=name)` and its variants work from then on.

    Call it where the module that holds `make_schedule` is imported, since every rank imports that module again.

    Args:
        name: A lower-case identifier that is not taken.
        make_schedule: Returns the schedule for a world size. It is proven for 1 to 8 ranks right away.

    Raises:
        ValueError: The name is taken or not valid.
        ScheduleError: The schedule is no all-reduce; the message says where.
    """
    if name in StrategyRegistry:
        raise ValueError(f"Lightning already has a strategy named {name!r}; choose another name.")
    registry.add_algorithm(name, make_schedule)
    _register_variants(name)


def register() -> None:
    """Registers all strategies of this package with Lightning; `import lit_parallel` calls it."""
    StrategyRegistry.register("single", SingleStrategy, description="One device")
    StrategyRegistry.register("dp", DataParallelStrategy, description="Data parallelism in one process")
    for name in registry.available_algorithms():
        _register_variants(name)
    for name, staleness in PUSH_PULL_STALENESS.items():
        for suffix, start_method in _START_METHODS.items():
            StrategyRegistry.register(
                f"{name}{suffix}",
                PushPullStrategy,
                description=f"Parameter servers, staleness at most {staleness}; processes by {start_method!r}",
                start_method=start_method,
                staleness=staleness,
            )


def _register_variants(name: str) -> None:
    strategy = _NAMED_STRATEGIES.get(name) or partial(AlgorithmStrategy, name)
    for suffix, start_method in _START_METHODS.items():
        for unused in (False, True):
            StrategyRegistry.register(
                f"{name}{suffix}{'_find_unused_parameters_true' if unused else ''}",
                strategy,
                description=f"Gradients summed by {name!r}; processes started by {start_method!r}",
                start_method=start_method,
                find_unused_parameters=unused,
            )
