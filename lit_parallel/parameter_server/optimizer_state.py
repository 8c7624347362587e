"""An optimizer's state, cut into shards and put together again, so that checkpoints fit any number of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_parallel.parameter_server.partition import Piece

#: Optimizers that treat every element by itself, so that a shard can be updated alone.
ELEMENT_WISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

#: By key or piece: name and value, as torch's optimizers keep it for a parameter.
State = dict[str, Any]
Fill = Callable[[int, Tensor, Tensor], None]


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


def merge_state(
    shards: Iterable[Mapping[Piece, State]], like: Mapping[str, Tensor], fill: Fill | None = None
) -> dict[str, State]:
    """The reverse of `cut_state`: all shards together, by key.

    Args:
        shards: Each with the state of its pieces.
        like: The parameters.
        fill: Gets the number of a shard, a vector of its state, and the memory where it belongs; copies by default.
    """
    state: dict[str, State] = {}
    for number, shard in enumerate(shards):
        for piece, values in shard.items():
            for name, value in values.items():
                merged = state.setdefault(piece.key, {})
                if not _is_vector(value):
                    merged[name] = value
                    continue
                if name not in merged:
                    merged[name] = torch.empty_like(like[piece.key], dtype=value.dtype)
                target = in_memory_order(merged[name])[piece.start : piece.stop]
                target.copy_(value) if fill is None else fill(number, value, target)
    return state


def gather_state(own: Mapping[Piece, State], like: Mapping[str, Tensor]) -> dict[str, State]:
    """The shards of all ranks merged on rank 0, {} on others; takes no memory but the result's. All ranks call it."""
    vectors = [value for state in own.values() for value in state.values() if _is_vector(value)]
    outline = {
        piece: {name: value.to("meta") if _is_vector(value) else value for name, value in state.items()}
        for piece, state in own.items()
    }
    outlines: list[Any] = [None] * dist.get_world_size()
    if dist.get_rank() != 0:
        dist.gather_object(outline)
        for vector in vectors:
            dist.send(vector, 0)
        return {}
    dist.gather_object(outline, outlines)
    own_vectors = iter(vectors)

    def fill(rank: int, value: Tensor, target: Tensor) -> None:
        if rank == 0:
            target.copy_(next(own_vectors))
        else:
            dist.recv(target, rank)

    return merge_state(outlines, like, fill)


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
