"""Which server holds what: keys are laid end to end and cut into shards of equal size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of a key, in the order in which they lie in memory."""

    key: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def plan_shards(keys: Mapping[str, tuple[int, int]], num_shards: int) -> list[tuple[Piece, ...]]:
    """Divides keys into shards: small ones share a shard, large ones are split.

    Shards differ by no more than one element. At most `num_shards` - 1 keys are split.

    Args:
        keys: For each key the number of elements and the bytes of an element.
        num_shards: Number of servers.

    Raises:
        ValueError: `num_shards` is not positive.
    """
    if num_shards < 1:
        raise ValueError(f"There must be at least one shard, not {num_shards}.")
    total = sum(num_elements * size for num_elements, size in keys.values())
    shards: list[tuple[Piece, ...]] = []
    for shard in range(num_shards):
        first, last = total * shard // num_shards, total * (shard + 1) // num_shards
        pieces, offset = [], 0
        for key, (num_elements, size) in keys.items():
            # An element belongs to the shard in which its first byte lies.
            start, stop = (min(max(-(-(place - offset) // size), 0), num_elements) for place in (first, last))
            if start < stop:
                pieces.append(Piece(key, start, stop))
            offset += num_elements * size
        shards.append(tuple(pieces))
    return shards
