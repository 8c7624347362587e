"""What every transport and every algorithm must do, for tests of this package and of others."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lit_parallel.schedules.cost import cost
from lit_parallel.schedules.schedule import Schedule
from lit_parallel.transports.transport import Transport

#: World sizes that tests of transports cover.
WORLD_SIZES = (1, 2, 3, 4, 7, 8)
#: Element types that every transport takes.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def lengths(world_size: int) -> tuple[int, ...]:
    """Lengths that tests of transports cover: none, one, too few for all ranks, and some that do not divide evenly."""
    return tuple(sorted({0, 1, world_size - 1, 1000}))


def example(rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    """A rank's input: small whole numbers, so that their sums are exact in every dtype and every order."""
    return ((torch.arange(num_elements) * (rank + 3)) % 11 + rank).to(dtype)


def check_transport(transport: Transport, schedule: Schedule, num_elements: int, dtype: torch.dtype) -> None:
    """Runs a schedule and compares the result with a plain sum, and the traffic with the schedule's cost.

    Call it on every rank. The tensor must be too small to be pipelined, since that adds messages.

    Args:
        transport: In a process that holds one rank it has the attribute `rank`.
        schedule: An all-reduce.
        num_elements: Length of the tensor.
        dtype: Its element type.

    Raises:
        AssertionError: What differs.
    """
    everyone = range(transport.world_size)
    ranks = [transport.rank] if hasattr(transport, "rank") else list(everyone)
    before = copy.deepcopy(transport.traffic)
    tensors = [example(rank, num_elements, dtype) for rank in ranks]

    transport.run(schedule, *tensors)

    expected = torch.stack([example(rank, num_elements, torch.int64) for rank in everyone]).sum(0).to(dtype)
    predicted = cost(schedule, num_elements, tensors[0].element_size())
    for rank, tensor, now, then in zip(ranks, tensors, transport.traffic, before, strict=True):
        where = f"{schedule.name}, {transport.world_size} ranks, {num_elements} elements of {dtype}, rank {rank}"
        assert torch.equal(tensor, expected), f"{where}: the result is not the sum."
        counted = (
            now.messages_sent - then.messages_sent,
            now.messages_received - then.messages_received,
            now.bytes_sent - then.bytes_sent,
            now.bytes_received - then.bytes_received,
        )
        planned = (
            predicted.messages_sent[rank],
            predicted.messages_received[rank],
            predicted.bytes_sent[rank],
            predicted.bytes_received[rank],
        )
        assert counted == planned, f"{where}: traffic {counted} differs from the cost {planned}."
