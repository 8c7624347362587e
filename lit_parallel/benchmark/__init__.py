"""Benchmarks that anyone can rerun: `python -m lit_parallel.benchmark --help`."""

from lit_parallel.benchmark.collectives import time_collectives
from lit_parallel.benchmark.training import time_steps

__all__ = ["time_collectives", "time_steps"]
