"""Two rings in opposite directions, half of the tensor each, so that both directions of every link are used."""

from __future__ import annotations

from lit_parallel.schedules.ring import ring_steps
from lit_parallel.schedules.schedule import Schedule


def double_ring(world_size: int) -> Schedule:
    """Chunks 0 to P-1 go one way round, chunks P to 2P-1 the other way.

    Cost: 2(P-1) steps; each rank sends and receives 2(P-1)/P of the tensor, half to each neighbour.
    """
    return Schedule(
        "double_ring",
        world_size,
        num_chunks=2 * world_size,
        make_steps=lambda: (
            there + back
            for there, back in zip(
                ring_steps(world_size, direction=1),
                ring_steps(world_size, direction=-1, first_chunk=world_size),
                strict=True,
            )
        ),
    )
