"""Workers that push and pull, against training on one device and against ddp."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lit_parallel import PushPullStrategy
from lit_parallel.parameter_server.wire import CurveKeys
from lit_parallel.testing import RankFailure, RanksError, run_ranks
from tests.strategies.fits import QUIET, Plain, TwoOptimizers, dataset, fit
from tests.strategies.test_parameter_server import OPTIMIZERS, Foreign, Lbfgs, scenario_of

DOUBLE = {"precision": "64-true"}


def fit_all(world_size, scenarios, placements, options):
    return {
        (scenario, str(placement)): fit(
            PushPullStrategy(staleness=0, **placement), world_size, scenario_of(scenario), **options
        )
        for scenario in scenarios
        for placement in placements
    }


def assert_like_one_device(by_rank, scenarios):
    for scenario in scenarios:
        expected = fit("single", 1, scenario_of(scenario), **DOUBLE)
        for results in by_rank:
            for key in expected:
                for (name, placement), weights in results.items():
                    if name == scenario:
                        torch.testing.assert_close(weights[key], expected[key], rtol=1e-10, atol=1e-12, msg=placement)


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_step_weights_equal_training_on_one_device(world_size):
    scenarios, placements = [*OPTIMIZERS, "accumulation", "clipping"], [{}, {"update_on": "worker"}]
    assert_like_one_device(run_ranks(fit_all, world_size, world_size, scenarios, placements, DOUBLE), scenarios)


def test_with_servers_of_their_own_too():
    placements = [{"servers": 1, "update_on": "worker"}, {"servers": 3}]
    assert_like_one_device(run_ranks(fit_all, 2, 2, ["adamw"], placements, DOUBLE), ["adamw"])


def fit_on_two_nodes():
    os.environ.update(NODE_RANK=os.environ["LOCAL_RANK"], LOCAL_RANK="0")
    return fit_all(1, ["adamw"], [{}, {"servers": 2}], {**DOUBLE, "num_nodes": 2})


def test_with_servers_on_several_hosts_too():
    """Two nodes in name; their messages go through the network, encrypted."""
    assert_like_one_device(run_ranks(fit_on_two_nodes, 2), ["adamw"])


def test_with_servers_by_hand_too(tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(CurveKeys.generate().to_json())
    command = [sys.executable, "-m", "lit_parallel.parameter_server", "--bind", "tcp://127.0.0.1:*", "--keys", keys]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    servers = [subprocess.Popen([*command, "--end-with-input"], **pipes) for _ in range(2)]
    addresses = [server.stdout.readline().strip() for server in servers]
    placements = [{"servers": addresses, "server_keys": keys}, {"servers": addresses[1:], "server_keys": keys}]
    assert_like_one_device(run_ranks(fit_all, 2, 2, ["momentum"], placements, DOUBLE), ["momentum"])
    for server in servers:
        server.communicate()
        assert server.returncode == 0


def fit_beside_ddp(scenarios):
    placements = [{}, {"update_on": "worker"}]
    results = fit_all(2, scenarios, placements, {}) | fit_all(2, ["clipping"], placements[1:], {})
    return {scenario: fit("ddp", 2, scenario) for scenario in [*scenarios, "clipping"]}, results


def test_two_ranks_in_step_give_the_bits_of_ddp():
    for rank, (expected, results) in enumerate(run_ranks(fit_beside_ddp, 2, ["plain", "bf16", "batchnorm"])):
        for (scenario, placement), weights in results.items():
            for key, value in expected[scenario].items():
                if rank == 0 or "running" not in key:  # where ddp leaves each rank's own statistics of the last batch
                    assert torch.equal(weights[key], value), (scenario, placement, key)


class Validated(Plain):
    """Notes the weights of each validation."""

    def __init__(self):
        super().__init__("adam")
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(torch.cat([each.detach().flatten() for each in self.parameters()]))


def train(strategy, epochs, path, resume):
    torch.manual_seed(3)
    module = Validated()
    trainer = Trainer(
        **QUIET, strategy=strategy, devices=2, max_epochs=epochs, use_distributed_sampler=False, num_sanity_val_steps=0
    )
    sampler = DistributedSampler(dataset(96), 2, trainer.global_rank, shuffle=False)
    loader = DataLoader(dataset(96), batch_size=12, sampler=sampler)
    trainer.fit(module, loader, DataLoader(dataset(4)), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    pulls = getattr(trainer.strategy, "pulls", [])
    return module.seen, module.state_dict(), [pull.staleness for pull in pulls]


@pytest.mark.parametrize("staleness", [1, math.inf])
def test_validation_and_the_end_see_one_version_on_all_ranks(tmp_path, staleness):
    path = tmp_path / "own.ckpt"
    first, second = run_ranks(train, 2, PushPullStrategy(staleness=staleness), 3, path, False)
    assert len(first[0]) == len(second[0]) == 12
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)
    for key, value in torch.load(path, weights_only=True)["state_dict"].items():
        assert torch.equal(first[1][key], value)
        assert torch.equal(second[1][key], value)
    assert max(first[2] + second[2]) <= staleness


@pytest.mark.parametrize(("first", "second"), [("ring", "served"), ("served", "ring"), ("served", "one server")])
def test_checkpoints_go_from_servers_to_others_and_back(tmp_path, first, second):
    path = tmp_path / "first.ckpt"
    run_ranks(train, 2, strategy_of(first), 1, path, False)
    resumed = run_ranks(train, 2, strategy_of(second), 3, path, True)[0]
    whole = run_ranks(train, 2, "ring", 3, tmp_path / "whole.ckpt", False)[0]
    for key, value in whole[1].items():
        assert torch.equal(resumed[1][key], value)


def strategy_of(name):
    return {
        "served": PushPullStrategy(staleness=0),
        "one server": PushPullStrategy(staleness=0, servers=1),
    }.get(name, name)


class Restored(Plain):
    """Goes back to its first weights in the middle, as a search for a learning rate does."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            self.first = {name: value.clone() for name, value in self.state_dict().items()}
        if batch_idx == 10:
            self.trainer.strategy.load_model_state_dict({"state_dict": self.first})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_restored():
    return [fit(strategy, 2, (Restored, {}, False)) for strategy in ("ddp", PushPullStrategy(staleness=0))]


def test_weights_that_are_loaded_in_training_go_to_the_servers():
    for expected, weights in run_ranks(fit_restored, 2):
        for key, value in expected.items():
            assert torch.equal(weights[key], value)


class Killed(Plain):
    """Rank 1 is killed in its third step, or the servers are."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == (1 if self.what == "worker" else 0):
            for pid in [os.getpid()] if self.what == "worker" else self.trainer.strategy._hosted.processes:
                os.kill(pid, signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train_killed(what, servers):
    trainer = Trainer(**QUIET, strategy=PushPullStrategy(staleness=0, servers=servers), devices=2, max_epochs=1)
    trainer.fit(Killed(what), DataLoader(dataset(), batch_size=12))


@pytest.mark.parametrize(
    ("what", "servers", "message"),
    [
        ("worker", 1, "worker 1 has not been heard for 5 seconds; it has ended or failed"),
        ("worker", None, "The server at ipc://.*/1 has not answered for 5 seconds|worker 1 has not been heard"),
        ("server", 2, "The server at ipc://.*/0 has not answered for 5 seconds"),
    ],
)
def test_whoever_is_killed_is_named(what, servers, message):
    results = run_ranks(train_killed, 2, what, servers, may_fail=(0, 1))
    if what == "worker":
        assert results[1] == RankFailure(-signal.SIGKILL, "")
    assert re.search(message, results[0].message), results[0].message


def train_module(make_module, options):
    fit(PushPullStrategy(**options), 2, (make_module, {}, False))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Foreign, "a parameter of shape .2, 3. that is not the module's"),
        (Lbfgs, "LBFGS is not known to be element-wise"),
        (TwoOptimizers, "PushPullStrategy needs automatic optimization"),
    ],
)
def test_what_servers_cannot_do_is_refused(module, message):
    with pytest.raises(RanksError, match=message):
        run_ranks(train_module, 2, module, {})


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Foreign, "a parameter of shape .2, 3. that is not the module's"),
        (Lbfgs, "LBFGS computes gradients several times in a step"),
    ],
)
def test_what_workers_cannot_do_is_refused(module, message):
    with pytest.raises(RanksError, match=message):
        run_ranks(train_module, 2, module, {"staleness": 0, "update_on": "worker"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": -1}, "staleness=-1 is not a number of pushes"),
        ({"servers": 0}, "servers=0: there must be at least one"),
        ({"servers": []}, "servers=..: there must be at least one"),
        ({"servers": "tcp://a:1"}, "servers='tcp://a:1': give a list of addresses"),
        ({"servers": ["tcp://a:1"]}, "server_keys is the file of keys of servers at tcp addresses"),
        ({"servers": 2, "server_keys": "keys.json"}, "server_keys is the file of keys of servers at tcp addresses"),
        ({"servers": ["tcp://a:1"], "server_keys": "/none"}, "server_keys='/none' cannot be read"),
        ({"update_on": "root"}, "Unknown update_on='root'; choose one of server, worker"),
        ({"update_on": "worker"}, "update_on='worker' needs staleness=0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PushPullStrategy(**options)
