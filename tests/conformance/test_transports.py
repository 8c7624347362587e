from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lit_parallel.schedules import Schedule, available_algorithms, get_algorithm, pipelined, ring
from lit_parallel.testing import DTYPES, WORLD_SIZES, RanksError, check_transport, example, lengths, run_ranks
from lit_parallel.transports import InMemoryTransport, ProcessGroupTransport, SharedMemoryTransport, TransportError
from tests.conformance.losing_a_peer import run_until_lost


def broken_ring(world_size: int) -> Schedule:
    """A ring that forgets one message."""
    first, *rest = ring(world_size).steps()
    steps = [first[:-1], *rest]
    return Schedule("broken", world_size, world_size, lambda: iter(steps))


class CopyingTransport(InMemoryTransport):
    """Never adds."""

    def run(self, schedule, *tensors, scale=1):
        copies = [
            tuple(type(send)(send.src, send.dst, send.chunk, False) for send in step) for step in schedule.steps()
        ]
        super().run(Schedule(schedule.name, schedule.world_size, schedule.num_chunks, lambda: iter(copies)), *tensors)


def all_cases(transport):
    for name in available_algorithms():
        schedule = get_algorithm(name).make_schedule(transport.world_size)
        for length in lengths(transport.world_size):
            for dtype in DTYPES:
                check_transport(transport, schedule, length, dtype)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_in_memory(world_size):
    all_cases(InMemoryTransport(world_size))


def on_ranks(make_transport):
    transport = make_transport()
    all_cases(transport)
    transport.close()
    transport.close()


@pytest.mark.parametrize("make_transport", [ProcessGroupTransport, SharedMemoryTransport])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_between_processes(world_size, make_transport):
    run_ranks(on_ranks, world_size, make_transport)


def check_broken():
    transport = ProcessGroupTransport()
    check_transport(transport, broken_ring(2), 1000, torch.float32)


def test_a_broken_algorithm_fails_on_every_transport():
    with pytest.raises(AssertionError, match="not the sum"):
        check_transport(InMemoryTransport(3), broken_ring(3), 1000, torch.float32)
    with pytest.raises(RanksError, match="not the sum"):
        run_ranks(check_broken, 2)


def test_a_broken_transport_fails():
    with pytest.raises(AssertionError, match="not the sum"):
        check_transport(CopyingTransport(3), ring(3), 1000, torch.float32)


def random_bits(name, world_size):
    """The result of unrounded random numbers, twice, on the process group; large enough to be pipelined."""
    transport = ProcessGroupTransport()
    schedule = get_algorithm(name).make_schedule(world_size)
    results = []
    for _ in range(2):
        tensor = torch.randn(2_000_003, generator=torch.Generator().manual_seed(transport.rank))
        transport.run(schedule, tensor)
        results.append(tensor)
    assert torch.equal(*results)
    transport.close()
    return results[0]


@pytest.mark.parametrize("name", available_algorithms())
def test_all_ranks_and_transports_get_the_same_bits(name):
    world_size = 3
    on_wire = run_ranks(random_bits, world_size, name, world_size)
    tensors = [torch.randn(2_000_003, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    in_memory = [tensor.clone() for tensor in tensors]
    InMemoryTransport(world_size).run(get_algorithm(name).make_schedule(world_size), *in_memory)
    for wire, memory in zip(on_wire, in_memory, strict=True):
        assert torch.equal(wire, memory)
    torch.testing.assert_close(in_memory[0].double(), sum(tensor.double() for tensor in tensors), rtol=0, atol=2e-6)


def count_pipelined():
    transport = ProcessGroupTransport()
    check_transport(transport, pipelined(get_algorithm("tree").make_schedule(2), 4), 1000, torch.float32)
    large = torch.ones(10_000_000)
    before = transport.traffic[0].messages_sent
    transport.run(get_algorithm("tree").make_schedule(2), large)
    assert torch.equal(large, torch.full_like(large, 2))
    return transport.traffic[0].messages_sent - before


def test_large_messages_of_a_tree_are_pipelined():
    assert min(run_ranks(count_pipelined, 2)) > 1


def staging_is_kept():
    transport = ProcessGroupTransport()
    schedule = ring(2)
    addresses = set()
    for length in (1000, 10, 1000):
        transport.run(schedule, torch.ones(length))
        addresses.add(next(iter(transport._staging.values())).data_ptr())
    return len(addresses)


def test_staging_memory_is_allocated_once():
    assert run_ranks(staging_is_kept, 2) == [1, 1]


def lose_a_peer():
    transport = ProcessGroupTransport()
    tensor = torch.ones(1_000_000)
    transport.run(ring(3), tensor)
    if transport.rank == 1:
        transport.close()
        dist.barrier()
        return 0.0, ""
    lost = run_until_lost(transport, tensor)
    transport.close()
    dist.barrier()
    return lost


def test_closing_ends_waiting_peers_at_once_and_names_the_rank():
    results = run_ranks(lose_a_peer, 3)
    for rank in (0, 2):
        waited, message = results[rank]
        assert waited < 30
        assert f"Rank {rank} lost contact with rank" in message
    assert any("rank 1 " in results[rank][1] for rank in (0, 2))


def use_after_close():
    transport = ProcessGroupTransport()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.run(ring(2), torch.ones(2))


def test_a_closed_transport_says_so():
    run_ranks(use_after_close, 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.ones(2)], "one tensor for each of this process's 2 ranks, not 1"),
        ([torch.ones(2), torch.ones(3)], "one length and dtype"),
        ([torch.ones(2), torch.ones(2).double()], "one length and dtype"),
        ([torch.ones(2, 2)] * 2, "must be flat"),
        ([torch.ones(4)[::2]] * 2, "contiguous"),
    ],
)
def test_wrong_tensors_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        InMemoryTransport(2).run(ring(2), *tensors)


def test_a_schedule_for_another_world_size_is_refused():
    with pytest.raises(ValueError, match="for 3 ranks, the transport has 2"):
        InMemoryTransport(2).run(ring(3), example(0, 2, torch.float32), example(1, 2, torch.float32))
