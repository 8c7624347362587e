"""Fashion-MNIST, in whole batches from memory."""

from lit_parallel.data.batches import BatchLoader, GlobalBatchSampler
from lit_parallel.data.fashion_mnist import FashionMNISTDataModule

__all__ = ["BatchLoader", "FashionMNISTDataModule", "GlobalBatchSampler"]
