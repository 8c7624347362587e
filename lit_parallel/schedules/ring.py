"""Ring all-reduce: reduce-scatter, then all-gather, each rank talking to its two neighbours only.

Source: Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from lit_parallel.schedules.schedule import Schedule, Send, Step


def ring(world_size: int) -> Schedule:
    """One ring.

    Cost: 2(P-1) steps; each rank sends and receives 2(P-1)/P of the tensor.
    """
    return Schedule("ring", world_size, num_chunks=world_size, make_steps=lambda: ring_steps(world_size, direction=1))


def ring_steps(world_size: int, direction: int, first_chunk: int = 0) -> Iterator[Step]:
    """The steps of a ring over `world_size` chunks from `first_chunk` on.

    Args:
        world_size: Number of ranks, P.
        direction: +1 sends to the next rank, -1 to the previous one.
        first_chunk: Where the ring's P chunks start, for algorithms that run several rings.
    """

    def step(offset: int, *, reduce: bool) -> Step:
        return tuple(
            Send(rank, (rank + direction) % world_size, first_chunk + (rank - direction * offset) % world_size, reduce)
            for rank in range(world_size)
        )

    # Reduce-scatter. Rank r starts by sending chunk r; what it receives, it adds and passes on in the next step.
    # After P-1 steps rank r holds the whole sum of chunk r+1 (r-1 in the other direction).
    for offset in range(world_size - 1):
        yield step(offset, reduce=True)
    # All-gather. The finished chunks go round once; after P-1 steps every rank holds all of them.
    for offset in range(-1, world_size - 2):
        yield step(offset, reduce=False)
