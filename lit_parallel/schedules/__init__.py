"""Algorithms as schedules: pure Python, without torch. One file per algorithm, listed in `registry`."""

from lit_parallel.schedules.central import central, reduce_to_root
from lit_parallel.schedules.cost import Cost, cost, plan_seconds
from lit_parallel.schedules.double_ring import double_ring
from lit_parallel.schedules.halving_doubling import halving_doubling
from lit_parallel.schedules.pipeline import pipelined, pipelined_for
from lit_parallel.schedules.registry import Algorithm, available_algorithms, get_algorithm
from lit_parallel.schedules.ring import ring
from lit_parallel.schedules.schedule import Schedule, Send, Step
from lit_parallel.schedules.sharded import sharded
from lit_parallel.schedules.tree import tree
from lit_parallel.schedules.verify import ScheduleError, verify

__all__ = [
    "Algorithm",
    "Cost",
    "Schedule",
    "ScheduleError",
    "Send",
    "Step",
    "available_algorithms",
    "central",
    "cost",
    "double_ring",
    "get_algorithm",
    "halving_doubling",
    "pipelined",
    "pipelined_for",
    "plan_seconds",
    "reduce_to_root",
    "ring",
    "sharded",
    "tree",
    "verify",
]
