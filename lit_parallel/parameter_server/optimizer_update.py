"""A torch optimizer that runs on a server."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_parallel.parameter_server.store import RefusedError


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
