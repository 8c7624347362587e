"""Lightning strategies: the thin layer between the Trainer and the transports."""

from lit_parallel.strategies.data_parallel import DataParallelStrategy
from lit_parallel.strategies.parameter_server import ParameterServerStrategy
from lit_parallel.strategies.push_pull import PushPullStrategy
from lit_parallel.strategies.registration import PUSH_PULL_STALENESS, register, register_algorithm
from lit_parallel.strategies.single import SingleStrategy
from lit_parallel.strategies.synchronous import (
    AllReduceStrategy,
    DoubleRingStrategy,
    HalvingDoublingStrategy,
    RingStrategy,
    SynchronousStrategy,
    TreeStrategy,
)

__all__ = [
    "PUSH_PULL_STALENESS",
    "AllReduceStrategy",
    "DataParallelStrategy",
    "DoubleRingStrategy",
    "HalvingDoublingStrategy",
    "ParameterServerStrategy",
    "PushPullStrategy",
    "RingStrategy",
    "SingleStrategy",
    "SynchronousStrategy",
    "TreeStrategy",
    "register",
    "register_algorithm",
]
