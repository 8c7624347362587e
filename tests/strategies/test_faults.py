"""When a rank fails, the others end soon, say why, and leave nothing behind (conftest.py checks that)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_parallel import ParameterServerStrategy, RingStrategy
from lit_parallel.testing import RankFailure, RanksError, run_ranks
from tests.strategies.fits import QUIET, Plain, dataset


class Fails(Plain):
    """Rank 1 fails in its third step."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raise":
                raise RuntimeError("rank 1's own error")
        loss = super().training_step(batch, batch_idx)
        if self.how == "backward" and self.global_rank == 1 and batch_idx == 2:
            self.net[5].weight.register_hook(fail)
        return loss


def fail(gradient):
    raise RuntimeError("rank 1's own error")


def train(how, world_size, overlap, transport):
    if transport == "shared weights":
        strategy = ParameterServerStrategy(update_on="server")
    else:
        strategy = RingStrategy(overlap=overlap, transport=transport)
    trainer = Trainer(**QUIET, strategy=strategy, devices=world_size, max_epochs=1)
    trainer.fit(Fails(how), DataLoader(dataset(), batch_size=12))


@pytest.mark.parametrize(
    ("how", "overlap", "transport"),
    [
        ("raise", False, "shared_memory"),
        ("raise", True, "process_group"),
        ("backward", False, "process_group"),
        ("backward", True, "shared_memory"),
        ("raise", False, "shared weights"),
        ("kill", False, "shared weights"),
        ("kill", False, "shared_memory"),
        ("kill", False, "process_group"),
        ("kill", True, "shared_memory"),
        ("kill", True, "process_group"),
    ],
)
def test_one_failing_rank_ends_all(how, overlap, transport):
    start = time.monotonic()
    results = run_ranks(train, 3, how, 3, overlap, transport, may_fail=(0, 1, 2))
    assert time.monotonic() - start < 60
    assert all(isinstance(result, RankFailure) for result in results)
    if how == "kill":
        assert results[1].exit_code == -signal.SIGKILL
    else:
        assert "rank 1's own error" in results[1].message
    for rank in (0, 2):
        assert "lost contact with rank" in results[rank].message or "Connection" in results[rank].message


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from tests.strategies.fits import QUIET, dataset
from tests.strategies.test_faults import Fails

if __name__ == "__main__":
    Trainer(**QUIET, strategy=sys.argv[1], devices=2, max_epochs=1).fit(Fails(sys.argv[2]), DataLoader(dataset(), 12))
"""


@pytest.mark.parametrize(
    ("strategy", "how"), [("ring", "raise"), ("ring", "kill"), ("ps_spawn", "raise"), ("tree", "none")]
)
def test_launched_processes_end_too(tmp_path, strategy, how):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    result = subprocess.run([sys.executable, script, strategy, how], capture_output=True, text=True, timeout=120)
    if how == "none":
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0
    if how == "raise":
        assert "rank 1's own error" in result.stderr
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True)
    assert left.stdout == ""


def sleep_for_ever():
    time.sleep(1000)


def test_ranks_that_do_not_end_are_killed():
    with pytest.raises(RanksError, match=r"ranks \[0, 1\] did not end within 3 seconds"):
        run_ranks(sleep_for_ever, 2, timeout=3)
