"""An optimizer's state, cut into shards and put together again, so that checkpoints fit any number of servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_parallel.parameter_server.partition import Piece

#: By key or piece: name and value, as torch's optimizers keep it for a parameter.
State = dict[str, Any]


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory, as a vector on the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) < tensor.numel()


def cut_state(state: Mapping[str, State], pieces: Iterable[Piece], like: Mapping[str, Tensor]) -> dict[Piece, State]:
    """The part of each key's state that belongs to each piece.

    Args:
        state: By key.
        pieces: Of any shard.
        like: The parameters: state of a parameter's shape is cut as the parameter is; the rest belongs to every piece.
    """
    cut: dict[Piece, State] = {}
    for piece in pieces:
        parameter = like[piece.key]
        cut[piece] = {}
        for name, value in state.get(piece.key, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                whole = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                value = in_memory_order(whole)[piece.start : piece.stop].clone()  # noqa: PLW2901
            cut[piece][name] = value
    return cut


def merge_state(shards: Iterable[Mapping[Piece, State]], like: Mapping[str, Tensor]) -> dict[str, State]:
    """The reverse of `cut_state`: all shards together, by key."""
    state: dict[str, State] = {}
    for piece, values in ((piece, values) for shard in shards for piece, values in shard.items() if values):
        parameter, merged = like[piece.key], state.setdefault(piece.key, {})
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() == 1:
                whole = merged.setdefault(name, torch.empty_like(parameter, dtype=value.dtype))
                in_memory_order(whole)[piece.start : piece.stop] = value
            else:
                merged[name] = value
    return state
