"""Benchmarks that anyone can rerun: `python -m lit_parallel.benchmark --help`."""

from lit_parallel.benchmark.overhead import overhead

__all__ = ["overhead"]
