"""Benchmarks that anyone can rerun: `python -m lit_parallel.benchmark --help`."""

from lit_parallel.benchmark.collectives import time_collectives
from lit_parallel.benchmark.epoch import time_epochs
from lit_parallel.benchmark.parameter_server import time_push_pull
from lit_parallel.benchmark.training import measure_memory, time_steps

__all__ = ["measure_memory", "time_collectives", "time_epochs", "time_push_pull", "time_steps"]
