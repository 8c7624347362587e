"""One device, one process: no ranks, no launcher."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override


class OneNode:
    """Refuses `Trainer(num_nodes=...)` above 1, for strategies that hold all their devices in one process."""

    #: The strategy's name, for messages.
    name: str

    @property
    def num_nodes(self) -> int:
        """Always 1; the Trainer sets it from its flag."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                f"strategy={self.name!r} runs in one process on one machine, but num_nodes={num_nodes}. Use a strategy"
                " with a process per device, such as 'ring' or 'ddp'."
            )


class SingleStrategy(OneNode, SingleDeviceStrategy):
    """`strategy="single"`: one device, on any accelerator; an alias for what Lightning does without a strategy."""

    name = "single"

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device; the Trainer sets it from its flags."""
        return []  # empty, so that the Trainer's devices are used and not ours

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ValueError(
                f"strategy='single' trains on one device, but devices={len(devices)}. Set devices=1, or choose a"
                " strategy for several devices, such as 'ring', 'ddp' or 'dp'."
            )
        self._root_device = devices[0]

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: object) -> None:
        """Registers nothing: `lit_parallel.strategies.register` does."""
