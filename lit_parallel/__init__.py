"""Every way of synchronising data-parallel training, as one flag of the Lightning Trainer.

`import lit_parallel` makes the strategies known to Lightning: `Trainer(strategy="ring", devices=2)`.
"""

from lit_parallel.strategies import (
    AllReduceStrategy,
    DataParallelStrategy,
    DoubleRingStrategy,
    HalvingDoublingStrategy,
    ParameterServerStrategy,
    PushPullStrategy,
    RingStrategy,
    SingleStrategy,
    TreeStrategy,
    register,
    register_algorithm,
)

__all__ = [
    "AllReduceStrategy",
    "DataParallelStrategy",
    "DoubleRingStrategy",
    "HalvingDoublingStrategy",
    "ParameterServerStrategy",
    "PushPullStrategy",
    "RingStrategy",
    "SingleStrategy",
    "TreeStrategy",
    "__version__",
    "register_algorithm",
]

__version__ = "0.1.0"

register()
del register
