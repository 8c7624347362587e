"""What a step costs through Lightning, against a plain PyTorch loop of the same model, batches and synchronisation."""

from __future__ import annotations

import logging
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lit_parallel.data import BatchLoader, GlobalBatchSampler
from lit_parallel.models import LitClassifier, ModelName
from lit_parallel.testing import run_ranks

PLAIN = "plain PyTorch, DDP"
_WARM_UP_STEPS = 10


def overhead(model: ModelName, batch_size: int, world_size: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Times training steps on synthetic images: a plain loop with torch's DDP, Lightning's ddp, and ring.

    The Lightning runs log and keep a checkpoint as the recipe does, without a progress bar.

    Args:
        model: "lenet" or "resnet18".
        batch_size: Images per rank.
        world_size: Ranks, with one torch thread each.
        steps: Steps per round, without the first ones, which warm up.
        rounds: How often all contenders take their turn.

    Returns:
        Seconds per step of each contender in each round.
    """
    results: dict[str, list[float]] = run_ranks(
        _run_contenders, world_size, model, batch_size, steps, rounds, timeout=3600
    )[0]
    return results


def _run_contenders(model: ModelName, batch_size: int, steps: int, rounds: int) -> dict[str, list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, strategy in ((PLAIN, None), ("Lightning, ddp", "ddp"), ("Lightning, ring", "ring")):
            torch.manual_seed(0)
            module, batches = LitClassifier(model), _batches(batch_size, steps + _WARM_UP_STEPS)
            dist.barrier()
            elapsed = _plain(module, batches) if strategy is None else _lightning(module, batches, strategy)
            seconds.setdefault(name, []).append(elapsed / steps)
    return seconds


def _batches(batch_size: int, num_batches: int) -> BatchLoader:
    world_size = dist.get_world_size()
    num_images = batch_size * num_batches * world_size
    images = torch.randint(256, (num_images, 1, 28, 28), dtype=torch.uint8)
    sampler = GlobalBatchSampler(
        num_images, batch_size * world_size, num_ranks=world_size, rank=dist.get_rank(), shuffle=True
    )
    return BatchLoader(images, torch.randint(10, (num_images,)), sampler)


def _plain(module: LitClassifier, batches: BatchLoader) -> float:
    net = DistributedDataParallel(module.net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), module.lr, module.momentum)
    start = 0.0
    for index, (images, labels) in enumerate(batches):
        if index == _WARM_UP_STEPS:
            start = time.perf_counter()
        loss = cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.perf_counter() - start


class _Clock(Callback):
    start = elapsed = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == _WARM_UP_STEPS:
            self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.elapsed = time.perf_counter() - self.start


def _lightning(module: LitClassifier, batches: BatchLoader, strategy: str) -> float:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategy,
            devices=dist.get_world_size(),
            accelerator="cpu",
            max_epochs=1,
            callbacks=[clock, ModelCheckpoint(folder)],
            logger=CSVLogger(folder),
            log_every_n_steps=20,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        dist.barrier()  # before the first rank removes its folder
    return clock.elapsed
