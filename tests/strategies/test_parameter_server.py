"""`ps` against training on one device and against ddp, wherever the weights are updated."""

from __future__ import annotations

import pytest
import torch

from lit_parallel import ParameterServerStrategy
from lit_parallel.testing import RanksError, run_ranks
from tests.strategies.fits import SCENARIOS, Plain, fit

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}


class TwoGroups(Plain):
    """Two parameter groups and a schedule; tensors in channels-last order, as some models have them."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net.to(memory_format=torch.channels_last)

    def configure_optimizers(self):
        make, options = OPTIMIZERS[self.optimizer]
        weights = [each for each in self.parameters() if each.dim() > 1]
        biases = [each for each in self.parameters() if each.dim() == 1]
        optimizer = make([{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}], **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Clipped(Plain):
    """Notes what the optimizer holds, and whether weights are shared."""

    sizes: tuple[int, int] = (0, 0)
    shared = False

    def on_train_batch_end(self, *args):
        (optimizer,) = self.trainer.optimizers
        states = [each for state in optimizer.state.values() for each in state.values()]
        self.sizes = sum(each.numel() for each in states), sum(each.numel() for each in self.parameters())
        self.shared = all(each.is_shared() for each in self.parameters())


class Lbfgs(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Frozen(Plain):
    """One layer does not learn, and the optimizer has it all the same."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class Foreign(Plain):
    """Its optimizer has a parameter of nobody."""

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.zeros(2, 3))], lr=0.1)


def scenario_of(name):
    if name in OPTIMIZERS:
        return lambda: TwoGroups(name), {"max_steps": 50, "max_epochs": 5}, False
    modules = {"lbfgs": Lbfgs, "frozen": Frozen, "foreign": Foreign}
    return (modules[name], {}, False) if name in modules else SCENARIOS[name]


WHERE = ("server", "worker")


def fit_everywhere(world_size, scenario, options):
    unused = {"find_unused_parameters": True} if scenario == "unused" else {}
    return {
        where: fit(ParameterServerStrategy(update_on=where, **unused), world_size, scenario_of(scenario), **options)
        for where in WHERE
    }


def fit_all(world_size, scenarios, options):
    return {scenario: fit_everywhere(world_size, scenario, options) for scenario in scenarios}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_equal_training_on_one_device(world_size):
    scenarios, double = [*OPTIMIZERS, "accumulation", "clipping"], {"precision": "64-true"}
    by_rank = run_ranks(fit_all, world_size, world_size, scenarios, double, timeout=240)
    for scenario in scenarios:
        expected = fit("single", 1, scenario_of(scenario), **double)
        for results in by_rank:
            for where in WHERE:
                for key, value in results[scenario][where].items():
                    torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12)


def fit_beside_ddp(world_size, scenarios):
    return {
        scenario: (fit("ddp", world_size, scenario_of(scenario)), fit_everywhere(world_size, scenario, {}))
        for scenario in scenarios
    }


def test_two_ranks_give_the_bits_of_ddp():
    scenarios = [*OPTIMIZERS, "plain", "accumulation", "bf16", "unused", "batchnorm", "frozen"]
    for results in run_ranks(fit_beside_ddp, 2, 2, scenarios):
        for scenario, (expected, by_place) in results.items():
            for where, weights in by_place.items():
                for key, value in expected.items():
                    assert torch.equal(weights[key], value), (scenario, where, key)


def train_clipped(world_size, algorithm):
    modules = []

    def make_module():
        modules.append(Clipped())
        return modules[0]

    scenario = (make_module, clipping(algorithm), False)
    weights = fit(ParameterServerStrategy(update_on="server"), world_size, scenario)
    (module,) = modules
    return weights, module.sizes, (module.shared, any(each.is_shared() for each in module.parameters()))


def clipping(algorithm):
    return {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_over_all_shards_and_state_is_split(algorithm):
    world_size = 3
    by_rank = run_ranks(train_clipped, world_size, world_size, algorithm)
    expected = fit("single", 1, "plain", **clipping(algorithm))
    for weights, (state, parameters), (shared, shared_after) in by_rank:
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)
        assert state == pytest.approx(parameters / world_size, abs=1)  # momentum
        assert (shared, shared_after) == (True, False)


@pytest.mark.parametrize(
    ("scenario", "options", "message"),
    [
        ("lbfgs", {}, "LBFGS is not known to be element-wise, as Adadelta, .*, SGD of torch are"),
        ("foreign", {}, "the optimizer has a parameter of shape .2, 3. that is not the module's"),
        ("manual", {}, "the module optimizes manually"),
        ("plain", {"transport": "process_group"}, "the ranks do not share memory"),
    ],
)
def test_what_servers_cannot_update_is_refused(scenario, options, message):
    with pytest.raises(RanksError, match=f"update_on='server' is not possible: {message}.* Use update_on='worker'"):
        run_ranks(refused, 2, scenario, options)


def refused(scenario, options):
    fit(ParameterServerStrategy(update_on="server", **options), 2, scenario_of(scenario))


def fit_manual(world_size):
    return fit("ddp", world_size, "manual"), fit("ps", world_size, "manual")


def test_workers_update_what_servers_cannot():
    for expected, weights in run_ranks(fit_manual, 2, 2):
        for key, value in expected.items():
            assert torch.equal(weights[key], value)


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match="Unknown update_on='root'; choose one of auto, server, worker"):
        ParameterServerStrategy(update_on="root")
