"""Training steps through Lightning and without it, all contenders in turn in the same processes."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lit_parallel.data import BatchLoader, GlobalBatchSampler
from lit_parallel.models import LitClassifier, lenet, resnet18
from lit_parallel.schedules import Schedule, available_algorithms
from lit_parallel.strategies import PushPullStrategy, RingStrategy
from lit_parallel.testing import run_ranks
from lit_parallel.transports import Traffic, Transport

PLAIN = "plain PyTorch, DDP"
DDP = "Lightning, ddp"
NO_SYNCHRONISATION = "no synchronisation"
RING_VARIANTS: dict[str, dict[str, Any]] = {
    "ring, overlap": {"overlap": True},
    "ring, process group": {"transport": "process_group"},
    "ring, process group, overlap": {"transport": "process_group", "overlap": True},
}
#: Servers in processes of their own.
SERVER_VARIANTS = {"ps, 1 server": 1, "ps, 2 servers": 2}
_WARM_UP_STEPS = 10


def mlp() -> nn.Module:
    """A network whose gradients are large for the work of a step: 10,078,810 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2800), nn.ReLU(), nn.Linear(2800, 2800), nn.ReLU(), nn.Linear(2800, 10)
    )


MODELS = {"lenet": lenet, "resnet18": resnet18, "mlp": mlp}
#: Images per rank and step.
BATCH_SIZES = {"lenet": 128, "resnet18": 8, "mlp": 32}


def overhead_contenders() -> list[str]:
    """What Lightning costs: a plain loop, Lightning's ddp, and ring."""
    return [PLAIN, DDP, "ring"]


def steps_contenders() -> list[str]:
    """Every algorithm between Lightning's ddp and no synchronisation at all, and ring with other options."""
    return [DDP, *available_algorithms(), *RING_VARIANTS, *SERVER_VARIANTS, NO_SYNCHRONISATION]


def memory_contenders() -> list[str]:
    """Lightning's ddp, every algorithm, and no synchronisation at all."""
    return [DDP, *available_algorithms(), NO_SYNCHRONISATION]


def time_steps(
    contenders: Sequence[str], model: str, batch_size: int, world_size: int, *, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Times training steps on synthetic images.

    The Lightning runs log and keep a checkpoint as the recipe does, without a progress bar.

    Args:
        contenders: Names of strategies, or the names above.
        model: A key of `MODELS`.
        batch_size: Images per rank.
        world_size: Ranks, with one torch thread each.
        steps: Steps per round, without the first ones, which warm up.
        rounds: How often all contenders take their turn.

    Returns:
        Seconds per step of each contender in each round, on the first rank.
    """
    results: list[dict[str, list[float]]] = run_ranks(
        _time_steps, world_size, contenders, model, batch_size, steps, rounds, timeout=3600
    )
    return results[0]


def _time_steps(
    contenders: Sequence[str], model: str, batch_size: int, steps: int, rounds: int
) -> dict[str, list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            torch.manual_seed(0)
            module, batches = LitClassifier("lenet"), _batches(batch_size, steps + _WARM_UP_STEPS)
            module.net = MODELS[model]()
            dist.barrier()
            seconds[name].append(
                (_plain(module, batches) if name == PLAIN else _lightning(module, batches, name)) / steps
            )
    return seconds


def measure_memory(
    contenders: Sequence[str], model: str, batch_size: int, world_size: int, *, steps: int, rounds: int
) -> dict[str, list[float]]:
    """The most memory that a rank holds during training, in MB, on the rank that holds most.

    Memory that ranks share counts in equal parts (PSS). Each training has processes of its own. Arguments as for
    `time_steps`.
    """
    return {
        name: [
            max(run_ranks(_peak_memory, world_size, name, model, batch_size, steps, timeout=3600))
            for _ in range(rounds)
        ]
        for name in contenders
    }


def _peak_memory(name: str, model: str, batch_size: int, steps: int) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            peak = max(peak, next(float(line.split()[1]) for line in lines if line.startswith("Pss:")))

    module = LitClassifier("lenet")
    module.net = MODELS[model]()
    watcher = threading.Thread(target=watch)
    watcher.start()
    _lightning(module, _batches(batch_size, steps + _WARM_UP_STEPS), name)
    done.set()
    watcher.join()
    return peak * 1024 / 1e6


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


class _NoTransport(Transport):
    """Leaves every rank's gradients as they are: what a step costs without any synchronisation."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.traffic = [Traffic()]

    def run(self, schedule: Schedule, *tensors: Tensor, scale: float = 1) -> None:
        pass

    def close(self) -> None:
        pass


class _NoSynchronisation(RingStrategy):
    def _make_transport(self) -> Transport:
        return _NoTransport()


def _lightning(module: LitClassifier, batches: BatchLoader, name: str) -> float:
    clock = _Clock()
    strategies: dict[str, str | Strategy] = {DDP: "ddp", NO_SYNCHRONISATION: _NoSynchronisation()}
    strategies |= {variant: RingStrategy(**options) for variant, options in RING_VARIANTS.items()}
    strategies |= {
        variant: PushPullStrategy(staleness=0, servers=number) for variant, number in SERVER_VARIANTS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=strategies.get(name, name),
            devices=dist.get_world_size(),
            accelerator="cpu",
            max_epochs=1,
            callbacks=[clock, ModelCheckpoint(f"{folder}/checkpoints")],
            logger=CSVLogger(folder),
            log_every_n_steps=20,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, batches)
        dist.barrier()  # before the first rank removes its folder
    return clock.elapsed
