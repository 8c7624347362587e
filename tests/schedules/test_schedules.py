from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_parallel.schedules import (
    Schedule,
    ScheduleError,
    Send,
    available_algorithms,
    cost,
    get_algorithm,
    pipelined,
    pipelined_for,
    plan_seconds,
    reduce_to_root,
    ring,
    tree,
    verify,
)
from lit_parallel.transports import InMemoryTransport


def make(name: str, world_size: int) -> Schedule:
    return get_algorithm(name).make_schedule(world_size)


@pytest.mark.parametrize("name", available_algorithms())
def test_every_algorithm_is_proven_for_1_to_64_ranks(name):
    for world_size in range(1, 65):
        verify(make(name, world_size))


@pytest.mark.parametrize("name", available_algorithms())
def test_pipelining_keeps_the_proof_and_the_bytes(name):
    for world_size in (2, 3, 4, 8):
        schedule = make(name, world_size)
        length = schedule.num_chunks * 16
        for num_blocks in (2, 3, 8):
            blocks = pipelined(schedule, num_blocks)
            verify(blocks)
            if length % (schedule.num_chunks * num_blocks) == 0:
                assert cost(blocks, length).bytes_sent == cost(schedule, length).bytes_sent


def test_reduce_to_root_gives_the_sum_to_the_root_only():
    verify(reduce_to_root(5), ranks={0})
    with pytest.raises(ScheduleError, match="rank 1 ends without the contributions of ranks"):
        verify(reduce_to_root(5))


@pytest.mark.parametrize("world_size", range(1, 65))
def test_costs_equal_the_formulas(world_size):
    p = world_size
    length = p * 64 * 6  # divides into every algorithm's chunks
    bandwidth_optimal = (2 * (p - 1) * length // p,) * p
    for name in ("ring", "double_ring", "ps"):
        total = cost(make(name, p), length)
        assert total.bytes_sent == total.bytes_received == bandwidth_optimal, name

    assert cost(make("ring", p), length).num_steps == 2 * (p - 1)
    assert cost(make("ps", p), length).num_steps == (2 if p > 1 else 0)

    central = cost(make("allreduce", p), length)
    assert central.busiest_messages == 2 * (p - 1)
    assert central.busiest_bytes == 2 * (p - 1) * length
    assert central.bytes_sent[1:] == central.bytes_received[1:] == (length,) * (p - 1)

    levels = math.ceil(math.log2(p))
    assert cost(make("tree", p), length).num_steps == 2 * levels
    assert cost(make("tree", p), length).bytes_received[0] == levels * length

    halving = cost(make("halving_doubling", p), length)
    if p & (p - 1) == 0:
        assert halving.bytes_sent == halving.bytes_received == bandwidth_optimal
        assert halving.messages_sent == (2 * levels,) * p
    assert halving.num_steps <= 2 * math.floor(math.log2(p)) + 2


def test_messages_without_elements_cost_nothing():
    total = cost(ring(8), num_elements=3, element_size=4)
    assert sum(total.messages_sent) == 3 * 2 * 7
    assert cost(ring(8), num_elements=0).num_steps == 0


@pytest.mark.parametrize("name", available_algorithms())
@given(data=st.data())
def test_any_run_equals_the_sum(name, data):
    world_size = data.draw(st.integers(1, 9))
    rows = data.draw(st.integers(0, 40))
    values = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(-1000, 1000), min_size=rows, max_size=rows),
                min_size=world_size,
                max_size=world_size,
            )
        ),
        dtype=torch.float64,
    ).reshape(world_size, rows)
    schedule = pipelined(make(name, world_size), data.draw(st.integers(1, 4)))
    tensors = list(values.clone())
    InMemoryTransport(world_size).run(schedule, *tensors)
    for tensor in tensors:
        assert torch.equal(tensor, values.sum(0))


def of_steps(world_size, num_chunks, *steps):
    return Schedule("broken", world_size, num_chunks, lambda: iter(steps))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of_steps(2, 1), r"ends without the contributions of ranks \[1\]"),
        (of_steps(2, 1, (Send(1, 0, 0, reduce=True),)), r"chunk 0 of rank 1 ends without .* \[0\]"),
        (of_steps(2, 1, (Send(1, 0, 0, True),), (Send(1, 0, 0, True),)), "counts a contribution twice"),
        (of_steps(2, 1, (Send(1, 0, 0, True), Send(0, 1, 0, False))), "read while it is written"),
        (of_steps(3, 1, (Send(1, 0, 0, False), Send(2, 0, 0, False))), "replaced and written again"),
        (of_steps(3, 1, (Send(1, 0, 0, True), Send(2, 0, 0, False))), "replaced and written again"),
        (of_steps(2, 1, (Send(0, 2, 0, True),)), "out of range; ranks go from 0 to 1"),
        (of_steps(2, 1, (Send(0, 0, 0, True),)), "out of range"),
        (of_steps(2, 2, (Send(0, 1, 1, True, num_chunks=2),)), "out of range"),
        (of_steps(0, 1), "must be at least 1"),
    ],
)
def test_the_proof_finds_what_is_wrong(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        verify(schedule)


def test_a_ring_without_its_last_step_is_no_all_reduce():
    broken = Schedule("broken", 4, 4, lambda: iter(list(ring(4).steps())[:-1]))
    with pytest.raises(ScheduleError, match="ends without"):
        verify(broken)


def test_steps_of_a_rank_are_its_own_messages_in_order():
    for rank in range(5):
        for mine, whole in zip(ring(5).steps_of(rank), ring(5).steps(), strict=True):
            assert mine == tuple(send for send in whole if rank in (send.src, send.dst))
            assert len(mine) == 2


def test_steps_of_thousands_of_ranks_are_made_lazily():
    assert len(next(ring(10_000).steps())) == 10_000


def test_pipelining_is_chosen_where_the_plan_says_that_it_pays():
    small, large = 4_096, 40_000_000
    arguments = {"latency": 1e-3, "bandwidth": 1e9}
    assert pipelined_for(tree(2), small, **arguments).num_chunks == 1
    chosen = pipelined_for(tree(2), large, **arguments)
    assert plan_seconds(chosen, large, **arguments) < 0.7 * plan_seconds(tree(2), large, **arguments)
    # A ring always uses both directions: blocks would only add steps.
    assert pipelined_for(ring(4), large, **arguments).num_chunks == 4


def test_unknown_algorithms_are_answered_with_the_valid_names():
    with pytest.raises(ValueError, match=r"Unknown algorithm 'rign'; available: allreduce, ring.*mean 'ring'\?"):
        get_algorithm("rign")
