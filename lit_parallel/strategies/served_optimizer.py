"""Which optimizers servers can run, and what Lightning calls in their place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_parallel.parameter_server import ELEMENT_WISE
from lit_parallel.parameter_server.optimizer_state import is_dense


def why_not_served(module: nn.Module, optimizer: Optimizer) -> str:
    """Why an optimizer cannot be run in parts, each on its part of the parameters, or ""."""
    if type(optimizer) not in ELEMENT_WISE:
        names = ", ".join(each.__name__ for each in ELEMENT_WISE)
        return f"{type(optimizer).__name__} is not known to be element-wise, as {names} of torch are"
    return why_not_cut(module, optimizer)


def why_not_cut(module: nn.Module, optimizer: Optimizer) -> str:
    """Why the parameters of an optimizer cannot be cut into shards, or ""."""
    parameters = set(module.parameters())
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter not in parameters:
            return f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's"
        if not is_dense(parameter):
            return f"the elements of a parameter of shape {tuple(parameter.shape)} do not lie side by side in memory"
    return ""


def why_not_stepped(optimizer: Optimizer) -> str:
    """Why an optimizer cannot make a step with given gradients, or ""."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"{type(optimizer).__name__} computes gradients several times in a step"
    return ""


class ServedOptimizer:
    """The module's optimizer, but its step takes place at the servers.

    Args:
        optimizer: The module's.
        pushing_early: What to do forward and backward in.
        exchange: What to do in place of the optimizer's step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pushing_early: Callable[[], contextlib.AbstractContextManager[None]],
        exchange: Callable[[Optimizer], None],
    ) -> None:
        self._optimizer, self._pushing_early, self._exchange = optimizer, pushing_early, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any]) -> Any:
        """As an optimizer's."""
        with self._pushing_early():
            result = closure()
        self._exchange(self._optimizer)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step
        return result
