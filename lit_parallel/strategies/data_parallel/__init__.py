"""Data parallelism in one process, which Lightning 2 dropped: one replica and one thread per device."""

from lit_parallel.strategies.data_parallel.strategy import DataParallelStrategy

__all__ = ["DataParallelStrategy"]
