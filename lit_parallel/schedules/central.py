"""All-reduce through one rank, as a first lesson on multi-GPU training writes it.

Source: Zhang et al., *Dive into Deep Learning*, section 13.5 (`allreduce` over a list of gradients).
"""

from __future__ import annotations

from lit_parallel.schedules.schedule import Schedule, Send, Step

ROOT = 0


def add_into_root(world_size: int) -> Step:
    """Every other rank sends its whole tensor to the root, which adds them in rank order."""
    return tuple(Send(rank, ROOT, chunk=0, reduce=True) for rank in range(1, world_size))


def copy_from_root(world_size: int) -> Step:
    """The root sends its whole tensor to every other rank."""
    return tuple(Send(ROOT, rank, chunk=0, reduce=False) for rank in range(1, world_size))


def reduce_to_root(world_size: int) -> Schedule:
    """Half of `central`: the root ends with the sum, the others keep what they had. P-1 messages at the root."""
    return Schedule("reduce_to_root", world_size, 1, lambda: iter([add_into_root(world_size)]))


def central(world_size: int) -> Schedule:
    """All add into the root, the root copies to all.

    Cost: 2 steps; the root receives P-1 and sends P-1 whole messages, every other rank one each way.
    """
    return Schedule(
        "central",
        world_size,
        num_chunks=1,
        make_steps=lambda: iter([add_into_root(world_size), copy_from_root(world_size)]),
    )
