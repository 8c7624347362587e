"""A training of three workers in which processes are killed: `python surviving.py FOLDER WHAT STALENESS SERVERS`.

Run by test_survival.py. Every rank that gets to the end leaves what it knows in FOLDER.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric

from lit_parallel import PushPullStrategy
from tests.strategies.fits import QUIET, Plain, dataset

WORLD_SIZE, EPOCHS = 3, 5


class Survivor(Plain):
    def __init__(self, folder: Path, what: str) -> None:
        super().__init__()
        self.folder, self.what = folder, what
        self.ranks = MeanMetric()
        self.seen: list[tuple[int, float, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        self.act(batch_idx)
        time.sleep(0.05)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def act(self, batch_idx):
        """Kills this worker, or a server, in the second epoch; once."""
        if self.current_epoch != 1 or batch_idx != 2 or (self.folder / "done").exists():
            return
        if self.what in ("worker", "comeback") and self.trainer.global_rank == 1:
            (self.folder / "done").touch()
            if self.what == "comeback":
                subprocess.Popen([sys.executable, *sys.argv])  # with the same variables in the environment
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "server" and self.trainer.global_rank == 0:
            (self.folder / "done").touch()
            os.kill(self.trainer.strategy._hosted.processes[1], signal.SIGKILL)
        if self.what == "first" and self.trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch, batch_idx):
        self.ranks.update(float(self.trainer.global_rank**2))

    def on_validation_epoch_end(self):
        weights = torch.cat([each.detach().flatten() for each in self.parameters()])
        self.seen.append((self.current_epoch, self.ranks.compute().item(), weights))
        self.ranks.reset()


def main() -> None:
    folder, what, staleness = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    torch.manual_seed(3)
    module = Survivor(folder, what)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=PushPullStrategy(staleness=staleness, servers=int(sys.argv[4]) or None),
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder)],
    )
    rank = trainer.global_rank
    sampler = DistributedSampler(dataset(360), WORLD_SIZE, rank, shuffle=False)
    validation = DataLoader(dataset(3), sampler=DistributedSampler(dataset(3), WORLD_SIZE, rank))
    trainer.fit(module, DataLoader(dataset(360), batch_size=12, sampler=sampler), validation)
    known = {
        "seen": module.seen,
        "members": dist.get_world_size(),
        "steps": trainer.global_step,
        "staleness": max(pull.staleness for pull in trainer.strategy.pulls),
    }
    torch.save(known, folder / f"rank {rank}.pt")


if __name__ == "__main__":
    main()
