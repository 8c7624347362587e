"""One all-reduce: every schedule on every transport between processes, its peers, and the floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lit_parallel.benchmark.peers import call_under_mpi, installed_peers, mpi_place
from lit_parallel.schedules import available_algorithms, get_algorithm
from lit_parallel.testing import run_ranks
from lit_parallel.transports import ProcessGroupTransport, SharedMemoryTransport, Transport

GLOO = "gloo's all_reduce"
FLOOR = "floor: one memory copy"
#: Bytes of the tensor: small, LeNet's gradients, large, ResNet-18's, very large.
SIZES = (4_096, 524_288, 4_194_304, 44_703_272, 160_000_000)

Seconds = dict[str, list[float]]


def time_collectives(world_size: int, sizes: Sequence[int], rounds: int) -> dict[int, Seconds]:
    """Times all-reduces of float32 tensors. Memory is allocated once and touched before.

    In processes that mpiexec started, MPI's own is timed too.

    Args:
        world_size: Ranks, with one torch thread each; mpiexec's, where it started this process.
        sizes: Bytes of the tensor.
        rounds: How often all contenders take their turn.

    Returns:
        For each size the seconds of each contender in each round, on the first rank. The floor is a copy of the whole
        tensor in memory, by all ranks at once.
    """
    results: list[dict[int, Seconds]]
    if mpi_place() is None:
        results = run_ranks(_time, world_size, sizes, rounds, timeout=3600)
    else:
        results = [call_under_mpi(_time, sizes, rounds)]
    return results[0]


def _time(sizes: Sequence[int], rounds: int) -> dict[int, Seconds]:
    transports: dict[str, Transport] = {
        "shared memory": SharedMemoryTransport(),
        "process group": ProcessGroupTransport(),
    }
    peers = installed_peers()
    seconds: dict[int, Seconds] = {}
    for size in sizes:
        tensor, source, target = (torch.ones(size // 4) for _ in range(3))
        contenders: dict[str, Callable[[], object]] = {
            GLOO: lambda tensor=tensor: dist.all_reduce(tensor),  # type: ignore[misc]
            FLOOR: lambda source=source, target=target: target.copy_(source),  # type: ignore[misc]
        }
        for name, all_reduce in peers.items():
            contenders[name] = lambda all_reduce=all_reduce, tensor=tensor: all_reduce(tensor)  # type: ignore[misc]
        for kind, transport in transports.items():
            for name in available_algorithms():
                schedule = get_algorithm(name).make_schedule(transport.world_size)
                contenders[f"{name}, {kind}"] = lambda transport=transport, schedule=schedule, tensor=tensor: (  # type: ignore[misc]
                    transport.run(schedule, tensor)
                )
        repeats = max(1, min(30, 20_000_000 // size))  # the ranks leave a barrier at different times
        seconds[size] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name, run in contenders.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    run()
                if number:  # the first round warms up
                    seconds[size][name].append((time.perf_counter() - start) / repeats)
    for transport in transports.values():
        transport.close()
    return seconds
