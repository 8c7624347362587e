"""A Lightning project that knows nothing of this package but its import."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import pytest

PROJECT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

import lit_parallel


class Regression(LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def train_dataloader(self):
        inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def on_train_end(self):
        print(f"rank {self.global_rank} of {self.trainer.world_size}: {self.trainer.callback_metrics['loss']:.4f}")
"""

PLAIN = (
    PROJECT
    + """
if __name__ == "__main__":
    Trainer(strategy="ring", devices=2, accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False).fit(
        Regression()
    )
"""
)

CLI = (
    PROJECT
    + """
if __name__ == "__main__":
    LightningCLI(Regression)
"""
)

BY_NAME = """
trainer: {strategy: ring, devices: 2, accelerator: cpu, max_epochs: 5, logger: false, enable_checkpointing: false}
"""

BY_CLASS = """
trainer:
  strategy:
    class_path: lit_parallel.RingStrategy
    init_args: {overlap: true, bucket_cap_mb: 1, timeout: "0:05:00"}
  devices: 2
  accelerator: cpu
  max_epochs: 5
  logger: false
  enable_checkpointing: false
"""


def run(folder, source, *arguments):
    (folder / "project.py").write_text(source)
    return subprocess.run(
        [sys.executable, "project.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )


def check_trained(result):
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"rank \d of 2: (\d\.\d{4})", result.stdout)]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 0.5


def test_with_one_import_and_one_flag(tmp_path):
    check_trained(run(tmp_path, PLAIN))


@pytest.mark.parametrize("config", [BY_NAME, BY_CLASS])
def test_with_lightning_cli_and_a_yaml_file(tmp_path, config):
    (tmp_path / "flags.yaml").write_text(config)
    check_trained(run(tmp_path, CLI, "fit", "--config", "flags.yaml"))


def test_on_two_machines(tmp_path):
    """Two launches, as on two machines; both are this one."""
    source = PLAIN.replace("devices=2", "devices=1, num_nodes=2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "project.py").write_text(source)
    machines = [
        subprocess.Popen(
            [sys.executable, "project.py"],
            cwd=tmp_path,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    losses = [re.findall(r"rank (\d) of 2: (\d\.\d{4})", output) for output, _ in outputs]
    assert [rank for ((rank, _),) in losses] == ["0", "1"]
    assert losses[0][0][1] == losses[1][0][1]


def test_lightning_cli_names_a_wrong_option(tmp_path):
    (tmp_path / "flags.yaml").write_text(BY_CLASS.replace("bucket_cap_mb", "bucket_cap"))
    result = run(tmp_path, CLI, "fit", "--config", "flags.yaml")
    assert result.returncode != 0
    assert "bucket_cap" in result.stderr
