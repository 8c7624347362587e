"""How long an epoch takes."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Times the training part of every epoch, without validation, and counts the batches.

    Logs `epoch_seconds`. `seconds_per_epoch` is the median: the first epoch also warms up.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._start = 0.0
        self._paused = 0.0

    @property
    def seconds_per_epoch(self) -> float:
        """Median seconds of the epochs so far, or nan."""
        return statistics.median(self._seconds) if self._seconds else float("nan")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._start, self._paused = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation runs inside the training epoch: it is subtracted."""
        self._paused -= time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the subtraction."""
        self._paused += time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's seconds."""
        self._seconds.append(time.perf_counter() - self._start - self._paused)
        pl_module.log("epoch_seconds", self._seconds[-1], sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far, for checkpoints."""
        return {"seconds": self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the epochs of the checkpoint."""
        self._seconds = list(state_dict["seconds"])
