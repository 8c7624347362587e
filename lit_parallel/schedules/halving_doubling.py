"""Recursive halving (reduce-scatter), then recursive doubling (all-gather): a ring's bytes in a tree's steps.

Source: Rabenseifner, *Optimization of collective reduction operations*, 2004. World sizes between powers of two are
folded as there: the ranks beyond the largest power of two first add into a partner and get the result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from lit_parallel.schedules.schedule import Schedule, Send, Step, largest_power_of_two


def halving_doubling(world_size: int) -> Schedule:
    """Partners exchange halves of what they are still responsible for.

    Cost, Q being the largest power of two up to P: 2*log2 Q steps and 2(Q-1)/Q of the tensor each way; where P is no
    power of two, 2 more steps, and a whole message each way more for the P-Q folded ranks and their partners.
    """
    core = largest_power_of_two(world_size)
    return Schedule("halving_doubling", world_size, num_chunks=core, make_steps=lambda: _steps(world_size, core))


def _steps(world_size: int, core: int) -> Iterator[Step]:
    folded = range(core, world_size)
    if folded:
        # Fold: rank core+i adds its whole tensor into rank i.
        yield tuple(Send(rank, rank - core, 0, reduce=True, num_chunks=core) for rank in folded)
    # Halving. Before distance d a rank is responsible for 2d chunks; it gives away the half that holds its partner's.
    # After distance 1, rank r holds the whole sum of chunk r.
    distances = [1 << level for level in range((core - 1).bit_length())]
    for distance in reversed(distances):
        yield tuple(
            Send(rank, rank ^ distance, _block(rank ^ distance, distance), reduce=True, num_chunks=distance)
            for rank in range(core)
        )
    # Doubling. The same partners in reverse: each gives the d finished chunks that it holds, and holds 2d afterwards.
    for distance in distances:
        yield tuple(
            Send(rank, rank ^ distance, _block(rank, distance), reduce=False, num_chunks=distance)
            for rank in range(core)
        )
    if folded:
        yield tuple(Send(rank - core, rank, 0, reduce=False, num_chunks=core) for rank in folded)


def _block(rank: int, size: int) -> int:
    """The first chunk of the aligned block of `size` chunks in which chunk `rank` lies."""
    return rank & ~(size - 1)
