"""A torch optimizer that runs on a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_parallel.parameter_server.optimizer_state import State
from lit_parallel.parameter_server.store import RefusedError


class OptimizerUpdate:
    """A torch optimizer on the values of one server.

    Workers in step have one optimizer for the mean of their gradients. Otherwise each worker has one of its own on the
    common values, with 1/W of the learning rate: a push moves them by 1/W of what training on that worker's gradients
    alone would. So W pushes go as far as the mean of W steps, with any optimizer, and momentum lasts as many of a
    worker's steps as it does on one device; one momentum for all diverges as soon as gradients are late (Hakimi et al.
    2019).

    Args:
        values: As the store's.
        name: Of an element-wise class of `torch.optim`.
        groups: For each parameter group its options, and the numbers of its keys under "keys".
        num_optimizers: W, or 1 for workers in step.
    """

    def __init__(self, values: list[Tensor], name: str, groups: list[dict[str, Any]], num_optimizers: int) -> None:
        self._parameters = [torch.nn.Parameter(value) for value in values]
        self._optimizers = [self._make(name, groups) for _ in range(num_optimizers)]
        self._groups = [group["keys"] for group in groups]
        self._options = [
            {option: value for option, value in group.items() if option != "params"}
            for group in self._optimizers[0].param_groups
        ]

    def __call__(self, worker: int, gradients: Mapping[int, Tensor], options: list[dict[str, Any]]) -> None:
        """As `Update` says."""
        optimizer = self._optimizers[worker]
        for group, known, new in zip(optimizer.param_groups, self._options, options, strict=True):
            known.update(new)
            group.update({**known, "lr": known["lr"] / len(self._optimizers)})
        for key, parameter in enumerate(self._parameters):
            parameter.grad = gradients.get(key)
        optimizer.step()

    def momentum(self) -> dict[int, float]:
        """For each key the share of a movement that the next step of its worker will repeat."""
        momentum: dict[int, float] = {}
        for keys, options in zip(self._groups, self._options, strict=True):
            share = options["betas"][0] if "betas" in options else options.get("momentum", 0)
            momentum |= dict.fromkeys(keys, float(share))
        return momentum

    def check(self, options: object) -> None:
        """Makes sure that options can be applied, before anything is.

        Raises:
            RefusedError: They are not those of the optimizer's groups.
        """
        if not isinstance(options, list) or len(options) != len(self._options):
            raise RefusedError(f"'options' must be a list of {len(self._options)} groups")
        for known, new in zip(self._options, options, strict=True):
            if not isinstance(new, dict):
                raise RefusedError("the options of a group must be an object")
            for name, value in new.items():
                if name not in known or not _is_like(value, known[name]):
                    raise RefusedError(f"the optimizer cannot have the option {name}={value!r}")

    def state(self) -> list[State]:
        """For each key the state of one optimizer: of several the mean, but the most advanced count of steps."""
        states = []
        for parameter in self._parameters:
            own = [optimizer.state[parameter] for optimizer in self._optimizers if parameter in optimizer.state]
            states.append({name: _merge([state[name] for state in own]) for name in own[0]} if own else {})
        return states

    def load_state(self, states: Sequence[State]) -> None:
        """Gives every optimizer this state.

        Raises:
            ValueError: It is of another number of keys.
        """
        if len(states) != len(self._parameters):
            raise ValueError(f"there are {len(self._parameters)} keys, not {len(states)}")
        for optimizer in self._optimizers:
            # Torch numbers parameters group by group.
            keys = (key for group in self._groups for key in group)
            state = {number: states[key] for number, key in enumerate(keys) if states[key]}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def state_dicts(self) -> list[dict[str, Any]]:
        """All that the optimizers hold."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """The reverse of `state_dicts`."""
        for optimizer, state_dict in zip(self._optimizers, state_dicts, strict=True):
            optimizer.load_state_dict(state_dict)

    def _make(self, name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        by_group = [
            {
                **{option: value for option, value in group.items() if option != "keys"},
                "params": [self._parameters[key] for key in group["keys"]],
            }
            for group in groups
        ]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(by_group)
        return optimizer


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    stacked = torch.stack(values)
    return stacked.amax(0) if first.dim() == 0 else stacked.mean(0).to(first.dtype)


def _is_like(value: object, known: object) -> bool:
    """Whether a value from a message is of the same kind as the one that is known."""
    if isinstance(known, (list, tuple)):
        return isinstance(value, list) and len(value) == len(known) and all(map(_is_like, value, known))
    if value is None or known is None:  # switches of the implementation, such as `foreach`
        return value is None or isinstance(value, (bool, str))
    return isinstance(value, type(known)) or (isinstance(value, (int, float)) and isinstance(known, (int, float)))
