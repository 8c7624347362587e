"""Synchronous strategies against Lightning's ddp and against training on one device."""

from __future__ import annotations

import pytest
import torch

from lit_parallel import RingStrategy, TreeStrategy
from lit_parallel.schedules import available_algorithms
from lit_parallel.strategies.synchronous import AlgorithmStrategy
from lit_parallel.testing import run_ranks
from tests.strategies.fits import SCENARIOS, fit

TRANSPORTS = ["process_group", "shared_memory"]


def fit_all(world_size, scenario, options, transports=TRANSPORTS):
    """Weights by ddp, and by each algorithm on each transport."""
    unused = {"find_unused_parameters": True} if SCENARIOS[scenario][2] else {}
    results = {"ddp": fit("ddp", world_size, scenario, **options)}
    for transport in transports:
        for name in available_algorithms():
            strategy = AlgorithmStrategy(name, transport=transport, **unused)
            results[f"{name}, {transport}"] = fit(strategy, world_size, scenario, **options)
    return results


def fit_scenarios(world_size, scenarios, options, transports=TRANSPORTS):
    """Many fits in the same processes: starting them costs more than the fits."""
    return {scenario: fit_all(world_size, scenario, options, transports) for scenario in scenarios}


def assert_equal(one, other, what=""):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), f"{what}: {key}"


def test_two_ranks_give_the_bits_of_ddp():
    for results in run_ranks(fit_scenarios, 2, 2, list(SCENARIOS), {}, timeout=280):
        for scenario, by_strategy in results.items():
            for strategy, weights in by_strategy.items():
                assert_equal(weights, by_strategy["ddp"], f"{scenario}: {strategy}")


@pytest.mark.parametrize(
    ("world_size", "transports"), [(3, TRANSPORTS), (4, TRANSPORTS), (8, ["shared_memory"])], ids=["3", "4", "8"]
)
def test_more_ranks_agree_with_ddp_and_with_one_device(world_size, transports):
    scenarios, double = ["plain", "accumulation", "clipping", "manual", "unused"], {"precision": "64-true"}
    by_rank = run_ranks(fit_scenarios, world_size, world_size, scenarios, double, transports, timeout=280)
    for scenario in scenarios:
        one_device = fit("single", 1, scenario, **double)
        first = by_rank[0][scenario]
        for strategy in first:
            for results in by_rank:
                assert_equal(results[scenario][strategy], first[strategy], f"{scenario}: {strategy}")
            for reference in (first["ddp"], one_device):
                for key, value in first[strategy].items():
                    torch.testing.assert_close(value, reference[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("world_size", [3, 4])
def test_every_run_gives_the_same_bits(world_size):
    arguments = (fit_all, world_size, world_size, "plain", {})
    for first, again in zip(run_ranks(*arguments), run_ranks(*arguments), strict=True):
        for strategy in first:
            assert_equal(first[strategy], again[strategy], strategy)


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
