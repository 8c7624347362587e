"""One slow worker, and what it costs: LeNet on Fashion-MNIST for the same time under several strategies.

    python recipes/stragglers.py
    python recipes/stragglers.py --devices 4 --slowdown 5 --seconds 30 --strategies ring ps ps_ssp ps_async

The last worker takes --slowdown times as long for a batch as the others. At the end it prints a line for each
strategy, and leaves stragglers.png: accuracy over time, and how stale the pulls were.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_parallel import ParameterServerStrategy, PushPullStrategy, RingStrategy
from lit_parallel.data import FashionMNISTDataModule
from lit_parallel.data.batches import BatchLoader, GlobalBatchSampler
from lit_parallel.models import LitClassifier
from lit_parallel.testing import run_ranks

SMALL_DATA = Path(__file__).parent / "data"
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ring": RingStrategy,
    "ps": ParameterServerStrategy,
    "ps_ssp": lambda: PushPullStrategy(staleness=4),
    "ps_async": PushPullStrategy,
}
BATCH_SIZE = 64


class UntilTimeIsUp(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches over and over, for a number of seconds; in step, the first rank's clock counts for all."""

    def __init__(self, batches: BatchLoader, seconds: float, *, in_step: bool) -> None:
        self._batches, self._seconds, self._in_step = batches, seconds, in_step

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        end = time.perf_counter() + self._seconds
        while True:
            for batch in self._batches:
                is_over = torch.tensor(time.perf_counter() > end)
                if self._in_step:
                    dist.broadcast(is_over, 0)
                if is_over:
                    return
                yield batch


class Straggler(Callback):
    """Makes the last rank slow, counts images, and keeps a copy of the weights every second."""

    def __init__(self, slowdown: float) -> None:
        self.num_images, self.weights = 0, list[tuple[float, dict[str, Tensor]]]()
        self._slowdown, self._begin, self._start = slowdown, 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock of the step."""
        self._start = time.perf_counter()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Between forward and backward: the slow worker waits."""
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep((self._slowdown - 1) * 3 * (time.perf_counter() - self._start))  # forward is a third of a step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts and keeps."""
        self.num_images += len(batch[1])
        seconds = time.perf_counter() - self._begin
        if trainer.is_global_zero and seconds >= len(self.weights):
            self.weights.append((seconds, deepcopy(pl_module.state_dict())))


def train(name: str, seconds: float, slowdown: float, data_dir: Path | None) -> dict[str, Any]:
    """Trains on this rank; rank 0 says how accuracy grew."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    data = FashionMNISTDataModule(BATCH_SIZE, data_dir, fallback_dir=SMALL_DATA)
    data.setup("fit")
    images, labels = data.split("train")
    sampler = GlobalBatchSampler(
        len(labels),
        BATCH_SIZE * dist.get_world_size(),
        num_ranks=dist.get_world_size(),
        rank=dist.get_rank(),
        shuffle=True,
    )
    batches = UntilTimeIsUp(BatchLoader(images, labels, sampler), seconds, in_step=name in ("ring", "ps"))
    strategy, straggler = STRATEGIES[name](), Straggler(slowdown)
    module = LitClassifier("lenet", lr=0.05)
    trainer = Trainer(
        strategy=strategy,
        devices=dist.get_world_size(),
        accelerator="cpu",
        max_epochs=1,
        callbacks=[straggler],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    images, labels = data.split("test")
    accuracy = []
    for moment, weights in straggler.weights:
        module.load_state_dict(weights)
        accuracy.append((moment, evaluate(module, images, labels)))
    return {
        "images": straggler.num_images,
        "accuracy": accuracy,
        "staleness": [pull.staleness for pull in getattr(trainer.strategy, "pulls", [])],
    }


def evaluate(module: LitClassifier, images: Tensor, labels: Tensor) -> float:
    """Share of images that are recognised."""
    with torch.no_grad():
        predictions = torch.cat([module(part.float() / 255).argmax(dim=1) for part in torch.split(images, 500)])
    return (predictions == labels).double().mean().item()


def draw(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Accuracy over time, and the staleness of all workers' pulls."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    curves.set(xlabel="seconds", ylabel="test accuracy")
    bars.set(xlabel="staleness of a pull (pushes ahead of the slowest)", ylabel="share of pulls")
    for name, by_rank in results.items():
        curves.plot(*zip(*by_rank[0]["accuracy"], strict=True), label=name)
        if staleness := [each for rank in by_rank for each in rank["staleness"]]:
            bars.hist(staleness, bins=30, weights=[1 / len(staleness)] * len(staleness), alpha=0.6, label=name)
    for axes in (curves, bars):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains with one strategy after the other, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--devices", type=int, default=4, help="workers, one of them slow (4)")
    parser.add_argument("--slowdown", type=float, default=5, help="how many times as long the slow one takes (5)")
    parser.add_argument("--seconds", type=float, default=20, help="for each strategy (20)")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST; unless given, it is searched")
    parser.add_argument("--output-dir", type=Path, default=Path("output"), help="where the picture is written")
    flags = parser.parse_args()
    if flags.devices < 2 or flags.slowdown < 1 or flags.seconds <= 0:
        parser.error("--devices must be at least 2, --slowdown at least 1, and --seconds more than 0")
    FashionMNISTDataModule(BATCH_SIZE, flags.data_dir, fallback_dir=SMALL_DATA).prepare_data()

    results = {}
    for name in flags.strategies:
        results[name] = by_rank = run_ranks(
            train, flags.devices, name, flags.seconds, flags.slowdown, flags.data_dir, timeout=flags.seconds + 300
        )
        images = sum(rank["images"] for rank in by_rank)
        stale = [each for rank in by_rank for each in rank["staleness"]] or [0]
        print(
            f"{name}: test acc {by_rank[0]['accuracy'][-1][1]:.3f}, {images / flags.seconds:.0f} samples/sec,"
            f" staleness {sum(stale) / len(stale):.1f} on average, at most {max(stale)}",
            flush=True,
        )
    path = flags.output_dir / "stragglers.png"
    draw(path, results)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
