"""Checkpoints are Lightning's own: any strategy goes on from any other's."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lit_parallel.testing import run_ranks
from tests.strategies.fits import QUIET, Plain, dataset


def train(strategy, devices, epochs, path, resume):
    torch.manual_seed(3)
    module = Plain("adam")
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=epochs, use_distributed_sampler=False)
    data, sampler = dataset(96), None
    if trainer.world_size > 1:
        sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=24 // trainer.world_size, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.state_dict(), trainer.strategy.optimizer_state(trainer.optimizers[0])


@pytest.mark.parametrize(
    ("first", "strategy"), [*(("ring", each) for each in ("ring", "ps", "ddp", "single", "dp")), ("ps", "ddp")]
)
def test_every_strategy_goes_on_from_anothers_checkpoint(tmp_path, first, strategy):
    path = tmp_path / "first.ckpt"
    saved, saved_optimizer = run_ranks(train, 2, first, 2, 1, path, False)[0]
    checkpoint = torch.load(path, weights_only=True)
    for key, value in saved.items():
        assert torch.equal(checkpoint["state_dict"][key], value)
    for index, state in saved_optimizer["state"].items():
        for key, value in state.items():
            assert torch.equal(checkpoint["optimizer_states"][0]["state"][index][key], value)

    whole = run_ranks(train, 2, "ring", 2, 3, tmp_path / "whole.ckpt", False)[0]
    if strategy in ("single", "dp"):
        resumed = train(strategy, 1 if strategy == "single" else 2, 3, path, True)
    else:
        resumed = run_ranks(train, 2, strategy, 2, 3, path, True)[0]
    exact = {} if strategy in ("single", "dp") else {"rtol": 0, "atol": 0}
    for key, value in whole[0].items():
        torch.testing.assert_close(resumed[0][key], value, **exact)
    for index, state in whole[1]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(resumed[1]["state"][index][key], value, **exact)
