"""What only shared memory must do."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from lit_parallel.schedules import available_algorithms, get_algorithm, ring
from lit_parallel.testing import RankFailure, example, run_ranks
from lit_parallel.transports import NoRoomError, OtherHostError, SharedMemoryTransport, TransportError, links
from tests.conformance.losing_a_peer import run_until_lost


def move_in_place():
    """Every view of a tensor follows it into shared memory, and other parts of its storage keep their values."""
    transport = SharedMemoryTransport()
    storage = torch.arange(20.0)
    tensor, neighbour, view = storage[5:15], storage[:5], storage[5:15].view(2, 5)
    assert not tensor.is_shared()
    transport.run(ring(2), tensor)
    assert tensor.is_shared()
    assert torch.equal(view.flatten(), 2 * torch.arange(5.0, 15))
    assert torch.equal(neighbour, torch.arange(5.0))
    transport.run(ring(2), storage[15:])
    assert torch.equal(storage[15:], 2 * torch.arange(15.0, 20))
    transport.close()


def test_a_storage_moves_with_all_its_views():
    run_ranks(move_in_place, 2)


def free_and_map():
    transport = SharedMemoryTransport()
    descriptors, plans = [], []
    for _ in range(30):
        tensor = torch.ones(50_000)
        transport.run(ring(2), tensor)
        reference = StorageWeakRef(tensor.untyped_storage())
        del tensor
        gc.collect()
        assert reference.expired()
        descriptors.append(len(os.listdir("/proc/self/fd")))
        plans.append(len(transport._plans))
    transport.close()
    return descriptors, plans


def test_freed_tensors_are_unmapped():
    for descriptors, plans in run_ranks(free_and_map, 2):
        assert max(descriptors[15:]) <= max(descriptors[5:15])  # not one more, of 30 tensors
        assert max(plans) == 1


def add_infinities():
    """Mixed precision provokes infinite gradients to find its scale: they are summed without a warning."""
    transport = SharedMemoryTransport()
    tensor = torch.tensor([1.0, torch.inf, 3e38, torch.nan])
    if dist.get_rank():
        tensor[1] = -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transport.run(ring(2), tensor, scale=0.5)
    transport.close()
    return tensor


def test_infinities_are_summed_as_torch_does():
    for tensor in run_ranks(add_infinities, 2):
        expected = torch.tensor([1.0, torch.nan, torch.inf, torch.nan])
        torch.testing.assert_close(tensor, expected, equal_nan=True)


def soak(steps):
    """Sums of random algorithms, lengths and delays, all exact; what the process holds stays the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    transport = SharedMemoryTransport()
    agreed, own = random.Random(1), random.Random(rank)
    schedules = [get_algorithm(name).make_schedule(world_size) for name in available_algorithms()]
    lengths = [agreed.randrange(1, 3000) for _ in range(20)] + [400_000]
    tensors = [example(rank, length, torch.float32) for length in lengths]
    sums = [sum(example(each, length, torch.float32) for each in range(world_size)) for length in lengths]
    for schedule in schedules:  # every plan is made once
        for tensor in tensors:
            transport.run(schedule, tensor)
    held = []
    for step in range(steps):
        index, schedule = agreed.randrange(len(lengths)), agreed.choice(schedules)
        if step % 500 != 0 and index == len(lengths) - 1:
            index = 0
        tensors[index].copy_(example(rank, lengths[index], torch.float32))
        if own.random() < 0.02:
            time.sleep(own.random() * 0.005)
        transport.run(schedule, tensors[index])
        assert torch.equal(tensors[index], sums[index]), f"step {step}"
        if step in (100, steps - 1):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            held.append((len(os.listdir("/proc/self/fd")), resident))
    transport.close()
    return held


@pytest.mark.parametrize(("world_size", "steps"), [(2, 10_000), (3, 3000), (4, 3000), (8, 1000)])
def test_thousands_of_random_steps(world_size, steps):
    for (descriptors, resident), (descriptors_after, resident_after) in run_ranks(soak, world_size, steps, timeout=280):
        assert descriptors_after == descriptors
        assert resident_after < resident + 8_000_000


def kill_one():
    transport = SharedMemoryTransport()
    tensor = torch.ones(3_000_000)
    transport.run(ring(3), tensor)
    if transport.rank == 1:
        if os.fork() == 0:  # as a data loader's worker: it outlives its parent for a while
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    lost = run_until_lost(transport, tensor)
    transport.close()
    return lost


def test_a_killed_rank_is_named_by_all_others_at_once():
    results = run_ranks(kill_one, 3, may_fail=(0, 1, 2))
    assert results[1] == RankFailure(-signal.SIGKILL, "")
    for rank in (0, 2):
        waited, message = results[rank]
        assert waited < 5
        assert f"Rank {rank} lost contact with rank 1:" in message


def close_one():
    transport = SharedMemoryTransport()
    tensor = torch.ones(10)
    transport.run(ring(2), tensor)
    if transport.rank == 0:
        transport.close()
        return ""
    with pytest.raises(TransportError) as caught:
        transport.run(ring(2), tensor)
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.run(ring(2), tensor)
    return str(caught.value)


def test_a_closed_peer_is_named():
    assert "lost contact with rank 0" in run_ranks(close_one, 2)[1]


def no_room():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NoRoomError, match="/dev/shm has .* bytes free"):
        SharedMemoryTransport(capacity=1 << 60)
    assert os.listdir("/proc/self/fd") == before


def one_has_no_room():
    """Only rank 1's storage does not fit, and only once it is seen."""
    transport = SharedMemoryTransport()
    statvfs = os.statvfs
    if transport.rank == 1:
        os.statvfs = lambda path: os.statvfs_result([1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    with pytest.raises(NoRoomError, match="0 bytes free"):
        transport.run(ring(3), torch.ones(10))
    os.statvfs = statvfs
    transport.close()


def other_host():
    gather = links._gather

    def wrong_address(value):
        values = gather(value)
        return [(b"\0nobody", token) for _, token in values] if isinstance(value, tuple) else values

    links._gather = wrong_address
    with pytest.raises(OtherHostError, match="rank 1 cannot reach rank 0"):
        SharedMemoryTransport()


@pytest.mark.parametrize("function", [no_room, one_has_no_room, other_host])
def test_all_ranks_are_told_that_it_cannot_be(function):
    run_ranks(function, 3)


def no_names():
    transport = SharedMemoryTransport()
    tensor = torch.ones(100_000)
    transport.run(ring(2), tensor)
    dist.barrier()
    names = os.listdir("/dev/shm")
    dist.barrier()
    transport.close()
    return names


def test_nothing_has_a_name_even_while_it_is_used():
    before = sorted(os.listdir("/dev/shm"))
    for names in run_ranks(no_names, 2):
        assert sorted(names) == before
