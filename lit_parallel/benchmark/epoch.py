"""An epoch on the real images: a tutorial's loop against Lightning with `ring`, and what each flag brings."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from lit_parallel.callbacks import Throughput
from lit_parallel.data import FashionMNISTDataModule
from lit_parallel.data.idx import FILES, find_file
from lit_parallel.models import LitClassifier, ModelName, lenet, resnet18
from lit_parallel.testing import run_ranks

TUTORIAL = "tutorial's loop, one process"
#: Name: Trainer options, model options.
_FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({}, {}),
    "ring, channels last": ({}, {"channels_last": True}),
    "ring, compiled": ({}, {"compile": True}),
    "ring, bf16-mixed": ({"precision": "bf16-mixed"}, {}),
    "ring, bf16-mixed, channels last": ({"precision": "bf16-mixed"}, {"channels_last": True}),
    "ring, bf16-mixed, channels last, compiled": (
        {"precision": "bf16-mixed"},
        {"channels_last": True, "compile": True},
    ),
}
_LOADER_WORKERS = 4
_MOMENTUM = 0.9
_RATE = 0.1


def time_epochs(
    model: ModelName, batch_size: int, world_size: int, *, num_batches: int | None, rounds: int, data_dir: Path | None
) -> dict[str, list[float]]:
    """Times the second epoch of trainings that each have processes of their own; the first one warms up.

    Args:
        model: "lenet" or "resnet18".
        batch_size: Of the global batch.
        world_size: Ranks of `ring`, which share the cores. The tutorial's loop is one process with all cores, and its
            images come from torchvision's data set through `ToTensor` and a `DataLoader` with four workers.
        num_batches: Batches of an epoch; None for the whole set.
        rounds: How often all contenders take their turn.
        data_dir: Where Fashion-MNIST is, as in `FashionMNISTDataModule`.

    Returns:
        Seconds of each contender in each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (TUTORIAL, *_FLAGS)}
    data = FashionMNISTDataModule(batch_size, data_dir)
    data.prepare_data()
    data.setup("fit")
    assert data.folder is not None
    with tempfile.TemporaryDirectory() as root:
        _unpack(data.folder, Path(root) / "FashionMNIST" / "raw")
        for _ in range(rounds):
            for name, values in seconds.items():
                if name == TUTORIAL:
                    results = run_ranks(_tutorial, 1, model, batch_size, num_batches, root, timeout=3600)
                else:
                    arguments = (name, model, batch_size, num_batches, data.folder)
                    results = run_ranks(_lightning, world_size, *arguments, timeout=3600)
                values.append(results[0])
    return seconds


def _unpack(folder: Path, target: Path) -> None:
    """Torchvision reads uncompressed files from a folder of its own."""
    target.mkdir(parents=True)
    for name in (name for names in FILES.values() for name in names):
        source = find_file(folder, name)
        assert source is not None
        with (
            (gzip.open if source.suffix == ".gz" else open)(source, "rb") as content,
            (target / name).open("wb") as out,
        ):
            shutil.copyfileobj(content, out)


def _tutorial(model: ModelName, batch_size: int, num_batches: int | None, root: str) -> float:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    images = FashionMNIST(root, train=True, transform=ToTensor())
    batches = DataLoader(images, batch_size, shuffle=True, num_workers=_LOADER_WORKERS)
    net = {"lenet": lenet, "resnet18": resnet18}[model]()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATE, momentum=_MOMENTUM)
    start = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for inputs, labels in islice(batches, num_batches):
            optimizer.zero_grad()
            loss = loss_function(net(inputs), labels)
            loss.backward()
            optimizer.step()
    return time.perf_counter() - start


def _lightning(name: str, model: ModelName, batch_size: int, num_batches: int | None, folder: Path) -> float:
    """As the recipe trains, without a progress bar."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer_options, model_options = _FLAGS[name]
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            strategy="ring",
            devices=int(os.environ["WORLD_SIZE"]),
            accelerator="cpu",
            max_epochs=2,
            limit_train_batches=num_batches,
            limit_val_batches=0,
            callbacks=[Throughput(), ModelCheckpoint(f"{output}/checkpoints")],
            logger=CSVLogger(output),
            log_every_n_steps=20,
            enable_progress_bar=False,
            enable_model_summary=False,
            **trainer_options,
        )
        trainer.fit(
            LitClassifier(model, lr=_RATE, momentum=_MOMENTUM, **model_options),
            datamodule=FashionMNISTDataModule(batch_size, folder),
        )
        trainer.strategy.barrier()  # before the first rank removes its folder
    return float(trainer.callback_metrics["epoch_seconds"])  # of the last epoch
