"""Callbacks for measuring and drawing a training run."""

from lit_parallel.callbacks.learning_curve import LearningCurve
from lit_parallel.callbacks.pull_statistics import PullStatistics
from lit_parallel.callbacks.throughput import Throughput

__all__ = ["LearningCurve", "PullStatistics", "Throughput"]
