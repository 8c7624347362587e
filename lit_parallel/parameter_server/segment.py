"""Memory that a worker shares with servers of its host, so that no tensors are in their messages."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_parallel.parameter_server.partition import Piece

_ALIGNMENT = 64


class Segment:
    """A worker's gradients, which servers read, and its weights, which they write when it pulls.

    It has no name: servers open it through the worker's process, and nothing is left when all have ended.

    Args:
        like: The weights, by name.

    Attributes:
        descriptor: Of the memory, in this process.
        gradients: Like the weights.
        weights: Like the weights.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, weight in like.items():
            size = -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._offsets[name] = (end, end + size)
            end += 2 * size
        self.descriptor = os.memfd_create("lit_parallel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, end)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(self.descriptor, end)
        self.gradients, self.weights = (
            {
                name: _vector(memory, weight.dtype, weight.numel(), self._offsets[name][half]).as_strided(
                    weight.shape, weight.stride()
                )
                for name, weight in like.items()
            }
            for half in (0, 1)
        )

    def offsets(self, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
        """In bytes, where the gradient and the weight of each piece begin."""
        offsets = []
        for piece in pieces:
            skipped = piece.start * self.weights[piece.key].itemsize
            gradient, weight = self._offsets[piece.key]
            offsets.append((gradient + skipped, weight + skipped))
        return offsets

    def close(self) -> None:
        """No server can map it from now on; tensors stay."""
        os.close(self.descriptor)


def map_pieces(
    pid: int, descriptor: int, offsets: Sequence[tuple[int, int]], like: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Maps the segment of another process of the same user.

    Args:
        pid: Of that process.
        descriptor: There.
        offsets: Of each piece, as `Segment.offsets` gives them.
        like: A vector for each piece.

    Returns:
        The gradients and the weights.

    Raises:
        OSError: The process or its memory cannot be reached.
        ValueError: A piece lies outside of the memory, or the memory could shrink.
    """
    own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory could shrink")
        memory = mmap.mmap(own, os.fstat(own).st_size)
    finally:
        os.close(own)
    gradients, weights = [], []
    for (gradient, weight), each in zip(offsets, like, strict=True):
        gradients.append(_vector(memory, each.dtype, len(each), gradient))
        weights.append(_vector(memory, each.dtype, len(each), weight))
    return gradients, weights


def _vector(memory: mmap.mmap, dtype: torch.dtype, length: int, offset: int) -> Tensor:
    if offset % dtype.itemsize:
        raise ValueError(f"no element of {dtype} begins at byte {offset}")
    return torch.frombuffer(memory, dtype=dtype, count=length, offset=offset)
