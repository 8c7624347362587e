"""What is needed to test an algorithm or a transport of your own."""

from lit_parallel.testing.conformance import DTYPES, WORLD_SIZES, check_transport, example, lengths
from lit_parallel.testing.ranks import RankFailure, RanksError, run_ranks

__all__ = [
    "DTYPES",
    "WORLD_SIZES",
    "RankFailure",
    "RanksError",
    "check_transport",
    "example",
    "lengths",
    "run_ranks",
]
