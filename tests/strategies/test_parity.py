"""Synchronous strategies against Lightning's ddp and against training on one device."""

from __future__ import annotations

import pytest
import torch

from lit_parallel import RingStrategy, TreeStrategy
from lit_parallel.schedules import available_algorithms
from lit_parallel.strategies.synchronous import AlgorithmStrategy
from lit_parallel.testing import run_ranks
from tests.strategies.fits import SCENARIOS, fit


def fit_all(strategies, world_size, scenario, options, transport="auto"):
    unused = {"find_unused_parameters": True} if SCENARIOS[scenario][2] else {}
    return {
        name: fit(
            name if name == "ddp" else AlgorithmStrategy(name, transport=transport, **unused),
            world_size,
            scenario,
            **options,
        )
        for name in strategies
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_give_the_bits_of_ddp(scenario, transport):
    strategies = ["ddp", *available_algorithms()]
    for results in run_ranks(fit_all, 2, strategies, 2, scenario, {}, transport):
        for strategy in strategies[1:]:
            assert_equal(results[strategy], results["ddp"])


@pytest.mark.parametrize("scenario", ["plain", "accumulation", "clipping", "manual", "unused"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_agree_with_ddp_and_with_one_device(world_size, scenario):
    strategies = ["ddp", *available_algorithms()]
    double = {"precision": "64-true"}
    first = run_ranks(fit_all, world_size, strategies, world_size, scenario, double)
    messages = run_ranks(fit_all, world_size, strategies[1:], world_size, scenario, double, "process_group")
    one_device = fit("single", 1, scenario, **double)
    for rank in range(world_size):
        for strategy in strategies:
            assert_equal(first[rank][strategy], first[0][strategy])
            for key, value in first[rank][strategy].items():
                torch.testing.assert_close(value, first[rank]["ddp"][key], rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(value, one_device[key], rtol=1e-10, atol=1e-12)
        for strategy in strategies[1:]:
            for key, value in first[rank][strategy].items():
                torch.testing.assert_close(messages[rank][strategy][key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_run_gives_the_same_bits(world_size, transport):
    arguments = (fit_all, world_size, available_algorithms(), world_size, "plain", {}, transport)
    for first, again in zip(run_ranks(*arguments), run_ranks(*arguments), strict=True):
        for name in available_algorithms():
            assert_equal(first[name], again[name])


def test_one_rank_is_one_device():
    (ring,), (single,) = run_ranks(fit, 1, "ring", 1), run_ranks(fit, 1, "single", 1)
    for key, value in single.items():
        torch.testing.assert_close(ring[key], value)


def fit_with_options(world_size):
    options = [
        RingStrategy(overlap=True, bucket_cap_mb=0.001),
        RingStrategy(overlap=True, bucket_cap_mb=0.001, transport="process_group"),
        RingStrategy(overlap=False, bucket_cap_mb=0.001),
        TreeStrategy(static_graph=True),
    ]
    return [fit("ddp", world_size), *(fit(strategy, world_size) for strategy in options)]


def test_options_do_not_change_the_bits():
    for reference, *others in run_ranks(fit_with_options, 2, 2):
        for other in others:
            assert_equal(other, reference)


def subnormal_gradients():
    """The mean of one and two times the smallest float: halving before and after the sum round differently."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from lit_parallel.schedules import ring
    from lit_parallel.strategies.gradient_sync import GradientSync
    from lit_parallel.transports import ProcessGroupTransport

    results = []
    for ours in (False, True):
        net = torch.nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        if ours:
            sync = GradientSync(ProcessGroupTransport(), ring(2), torch.device("cpu"), overlap=False)
            ddp.register_comm_hook(None, sync.make_hook())
        ddp(torch.tensor([[1.5e-45 * (1 + 2 * dist.get_rank())]])).sum().backward()
        results.append(net.weight.grad.clone())
        if ours:
            sync.close()
    return results


def test_even_the_smallest_gradients_round_as_in_ddp():
    for reference, ours in run_ranks(subnormal_gradients, 2):
        assert torch.equal(reference, ours)
