"""How far apart the workers of a parameter server are."""

from __future__ import annotations

import statistics
import time

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_parallel.strategies import PushPullStrategy


class PullStatistics(Callback):
    """Logs, for every epoch under `PushPullStrategy`, what the pulls of all ranks have brought.

    Logs `staleness_mean` and `staleness_max` (in pushes), `pull_seconds` (the mean wait for a pull, mostly of the
    slower workers) and `versions_per_second` (updates that the servers have applied).

    Raises:
        MisconfigurationException: The strategy is another one.
    """

    def __init__(self) -> None:
        self._start = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes sure that there is something to log."""
        if not isinstance(trainer.strategy, PushPullStrategy):
            raise MisconfigurationException(
                f"PullStatistics logs the pulls of a PushPullStrategy, and this is {type(trainer.strategy).__name__}."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new count."""
        assert isinstance(trainer.strategy, PushPullStrategy)
        trainer.strategy.pulls.clear()
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's figures."""
        assert isinstance(trainer.strategy, PushPullStrategy)
        pulls, seconds = list(trainer.strategy.pulls), time.perf_counter() - self._start
        if not pulls:
            return
        versions = pulls[-1].version - pulls[0].version
        pl_module.log("staleness_mean", statistics.fmean(pull.staleness for pull in pulls), sync_dist=True)
        pl_module.log("pull_seconds", statistics.fmean(pull.seconds for pull in pulls), sync_dist=True)
        pl_module.log("versions_per_second", versions / seconds, sync_dist=True)
        most = float(max(pull.staleness for pull in pulls))
        pl_module.log("staleness_max", most, sync_dist=True, reduce_fx="max")
