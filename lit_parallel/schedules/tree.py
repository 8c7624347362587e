"""Binomial tree: reduce to the root, then broadcast. Few steps, so it is quick for small tensors.

Source: Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH*, 2005.
"""

from __future__ import annotations

from collections.abc import Iterator

from lit_parallel.schedules.schedule import Schedule, Send, Step


def tree(world_size: int) -> Schedule:
    """Pairs at distance 1, 2, 4, ... add into the lower rank; the same pairs in reverse copy back.

    Cost: 2*ceil(log2 P) steps of one whole message; the root receives and sends ceil(log2 P) messages.
    """
    return Schedule("tree", world_size, num_chunks=1, make_steps=lambda: _steps(world_size))


def _steps(world_size: int) -> Iterator[Step]:
    distances = [1 << level for level in range((world_size - 1).bit_length())]
    # Reduce. After distance d, each rank that is a multiple of 2d holds the sum of the 2d ranks from itself on.
    for distance in distances:
        yield tuple(
            Send(rank + distance, rank, chunk=0, reduce=True) for rank in range(0, world_size - distance, 2 * distance)
        )
    # Broadcast. After distance d, every rank that is a multiple of d holds the whole sum.
    for distance in reversed(distances):
        yield tuple(
            Send(rank, rank + distance, chunk=0, reduce=False) for rank in range(0, world_size - distance, 2 * distance)
        )
