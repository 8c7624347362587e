"""Small trainings that several test modules compare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lit_parallel  # noqa: F401

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(LightningModule):
    """A small network with a convolution, so that layouts matter; no batch normalisation."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 32), nn.Tanh(), nn.Linear(32, 3)
        )
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        if self.optimizer == "adam":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WithUnused(Plain):
    """One layer is used in every other step, one never."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        if batch_idx % 2:
            logits = self.sometimes(logits)
        return nn.functional.cross_entropy(logits, labels)

    def on_train_batch_end(self, *args):
        assert self.never.weight.grad is None


class TwoOptimizers(Plain):
    """Manual optimization, as a GAN has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        for index, optimizer in enumerate(self.optimizers()):
            logits = self.net(images)
            loss = nn.functional.cross_entropy(self.head(logits) if index else logits + 0 * self.head(logits), labels)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)


class WithBatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm2d(4))


#: Module, Trainer options, whether parameters may be unused.
Scenario = tuple[Callable[[], Plain], dict[str, Any], bool]
SCENARIOS: dict[str, Scenario] = {
    "plain": (Plain, {}, False),
    "accumulation": (Plain, {"accumulate_grad_batches": 2, "max_steps": 20, "max_epochs": 4}, False),
    "clipping": (Plain, {"gradient_clip_val": 0.1}, False),
    "bf16": (Plain, {"precision": "bf16-mixed"}, False),
    "manual": (TwoOptimizers, {"max_steps": 40}, False),
    "unused": (WithUnused, {}, True),
    "batchnorm": (WithBatchNorm, {}, False),
}


def dataset(num_samples: int = 480, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(num_samples, 1, 8, 8, generator=generator, dtype=dtype)
    return TensorDataset(images, torch.randint(3, (num_samples,), generator=generator))


def fit(strategy: Any, devices: int, scenario: str | Scenario = "plain", **options: Any) -> dict[str, torch.Tensor]:
    """Trains 20 optimizer steps on one order of the data and returns weights and buffers.

    Each global batch is 24 consecutive samples; rank r of P takes every P-th of them.
    """
    make_module, scenario_options, unused = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    if unused and isinstance(strategy, str) and devices > 1:
        strategy = f"{strategy}_find_unused_parameters_true"
    torch.manual_seed(3)
    module = make_module()
    trainer = Trainer(
        **{
            **QUIET,
            "strategy": strategy,
            "devices": devices,
            "max_steps": 20,
            "use_distributed_sampler": False,
            **scenario_options,
            **options,
        }
    )
    data = dataset()
    sampler = None
    if trainer.world_size > 1:
        sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=24 // trainer.world_size, sampler=sampler))
    assert trainer.global_step == trainer.max_steps
    return module.state_dict()
