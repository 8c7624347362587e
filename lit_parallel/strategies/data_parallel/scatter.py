"""Splitting a batch over devices, and putting the outputs together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """What one device gets of a batch.

    Attributes:
        device: The device.
        arguments: A step's arguments with every tensor's share of dim 0 on that device.
        num_samples: Length of that share.
    """

    device: torch.device
    arguments: tuple[Any, ...]
    num_samples: int


def scatter(arguments: tuple[Any, ...], devices: Sequence[torch.device]) -> list[Shard]:
    """Splits the tensors of a step's arguments on dim 0 into near-equal shares; everything else is shared.

    A remainder goes to the first devices. With fewer samples than devices only the first devices get a shard, and
    with no tensor at all only the first one does, so that every sample is used exactly once.

    Args:
        arguments: Nested lists, tuples, mappings and dataclasses of tensors and other objects. Tensors have the
            batch's length in dim 0; those without dimensions are shared.
        devices: The devices, the root first.

    Raises:
        ValueError: The tensors' lengths differ, so that it is not clear what one sample is.
    """
    shapes: list[torch.Size] = []
    apply_to_collection(arguments, Tensor, lambda tensor: shapes.append(tensor.shape) if tensor.dim() else None)
    lengths = {shape[0] for shape in shapes}
    if len(lengths) > 1:
        raise ValueError(
            "strategy='dp' splits every tensor of a batch on dim 0, but the lengths there differ:"
            f" {', '.join(str(tuple(shape)) for shape in shapes)}. Keep what is not per sample out of the batch (in the"
            " module, or as a tensor without dimensions), or use a strategy with a process per device, such as 'ddp'."
        )
    num_samples = lengths.pop() if lengths else 0
    num_shards = max(1, min(num_samples, len(devices)))

    def share(tensor: Tensor, index: int) -> Tensor:
        return (tensor.tensor_split(num_shards)[index] if tensor.dim() else tensor).to(
            devices[index], non_blocking=True
        )

    return [
        Shard(
            devices[index],
            apply_to_collection(arguments, Tensor, share, index),
            num_samples // num_shards + (index < num_samples % num_shards),
        )
        for index in range(num_shards)
    ]


def gather(outputs: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """Puts the outputs of all devices together, as one device would have returned them for the whole batch.

    Tensors are joined on dim 0; of those without dimensions, floating-point ones become their mean weighted by the
    number of samples and integers (counts) their sum. Mappings, lists and tuples are walked; any other object is the
    first device's.

    Args:
        outputs: One output per shard, of one structure.
        weights: Each shard's share of the samples; they add to 1.
        device: Where the result goes.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        tensors = [output.to(device) for output in outputs]
        if first.dim():
            return torch.cat(tensors)
        stacked = torch.stack(tensors)
        return stacked.sum() if not first.is_floating_point() else weighted_mean(stacked, weights)
    if isinstance(first, Mapping):
        return type(first)({key: gather([output[key] for output in outputs], weights, device) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        items = [gather(parts, weights, device) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean of a vector under weights that add to 1."""
    return (values * torch.tensor(weights, dtype=values.dtype, device=values.device)).sum()
