"""Batches cut from memory, shared out over ranks so that every sample is used exactly once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class GlobalBatchSampler:
    """One rank's share of every global batch.

    The order of all samples is cut into global batches, and each of them into near-equal shares, one per rank. Every
    sample is in exactly one share of an epoch, and all ranks have the same number of batches, none of them empty: a
    last batch with fewer samples than ranks is joined to the one before it.

    Args:
        num_samples: Length of the data set, at least `num_ranks`.
        batch_size: Size of a global batch, at least `num_ranks`.
        num_ranks: World size.
        rank: Whose shares to give.
        shuffle: A new order in every epoch, the same on all ranks.
        seed: Of the order.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, num_ranks: int = 1, rank: int = 0, shuffle: bool, seed: int = 0
    ) -> None:
        for name, value in (("The data set", num_samples), ("The batch size", batch_size)):
            if value < num_ranks:
                raise ValueError(
                    f"{name} ({value}) is smaller than the number of devices ({num_ranks}): some would have nothing to"
                    " do. Use fewer devices or larger batches."
                )
        self._num_samples, self._seed, self._shuffle = num_samples, seed, shuffle
        self._num_ranks, self._rank = num_ranks, rank
        self._epoch = 0
        self._starts = list(range(0, num_samples, batch_size))
        if num_samples - self._starts[-1] < num_ranks:
            self._starts.pop()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's order; the Trainer calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the indices of each share."""
        order = torch.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        for batch in order.tensor_split(self._starts[1:]):
            yield batch.tensor_split(self._num_ranks)[self._rank]


class BatchLoader:
    """Yields (images, labels) batches sliced from memory: whole batches, not one decoded image at a time.

    The Trainer takes it like a DataLoader, and finds the sampler under a DataLoader's names to set the epoch.

    Args:
        images: uint8 images (N, 1, H, W).
        labels: Labels (N,).
        sampler: Which samples go into which batch.
    """

    def __init__(self, images: Tensor, labels: Tensor, sampler: GlobalBatchSampler) -> None:
        self._images, self._labels = images, labels
        self.sampler = self.batch_sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields float images (n, 1, H, W) in [0, 1] and labels (n,)."""
        for indices in self.sampler:
            yield self._images[indices].float().div_(255), self._labels[indices]
