"""`self.log` and torchmetrics under data parallelism in one process: every sample is counted once."""

from __future__ import annotations

import copy
import inspect
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

from lit_parallel.strategies.data_parallel.scatter import weighted_mean

_LOG_SIGNATURE = inspect.signature(LightningModule.log)
_MERGEABLE = (dim_zero_sum, dim_zero_max, dim_zero_min)
_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class LogRecorder:
    """Takes the place of `self.log` on one device for one step."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the call for `log_together`."""
        self.calls.append(dict(_LOG_SIGNATURE.bind(None, *args, **kwargs).arguments))


class ReplicaMetrics:
    """The copies of a module's metrics, one on each device.

    Every device, the root too, updates a copy of its own that starts empty in each step; `merge` then adds all copies
    into the module's metric, as torchmetrics does over ranks.

    Args:
        module: The module on the root device.
        devices: The devices of the step.
        cache: Copies of earlier steps, reused: copying a metric is slow.
    """

    def __init__(self, module: Module, devices: Sequence[torch.device], cache: dict[int, list[Module]]) -> None:
        self._devices = devices
        self._places = list(metric_places(module))
        self._copies = {
            id(metric): self._empty_copies(metric, cache.setdefault(id(metric), [])) for _, _, metric in self._places
        }

    def on(self, index: int) -> dict[int, Module]:
        """The copies on one device, by the id of the original."""
        return {key: copies[index] for key, copies in self._copies.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module itself uses the first device's copies."""
        for parent, name, metric in self._places:
            parent._modules[name] = self._copies[id(metric)][0]
        try:
            yield
        finally:
            for parent, name, metric in self._places:
                parent._modules[name] = metric

    def merge(self) -> None:
        """Adds what all devices saw into the module's metrics, and sets the value that on-step logging shows."""
        for _, _, metric in self._places:
            *copies, scratch = self._copies[id(metric)]
            for original, step, *parts in zip(*map(_metrics_in, (metric, scratch, *copies)), strict=True):
                updated = [part for part in parts if part.update_called]
                if not updated:
                    continue
                _merge_states(original, updated)
                if any(part._forward_cache is not None for part in updated):
                    _merge_states(step, updated)
                    original._forward_cache = step.compute()

    def original_of(self, value: Metric) -> Metric:
        """The module's own metric of which a device logged its copy."""
        for _, _, metric in self._places:
            for copies in self._copies[id(metric)]:
                for original, part in zip(_metrics_in(metric), _metrics_in(copies), strict=True):
                    if part is value:
                        return original
        return value

    def _empty_copies(self, metric: Module, copies: list[Module]) -> list[Module]:
        # One per device, and one on the root for the whole step's value.
        for device in (*self._devices[len(copies) :], self._devices[0])[: len(self._devices) + 1 - len(copies)]:
            copies.append(_separate(copy.deepcopy(metric)).to(device))
        for each in copies:
            each.reset()  # type: ignore[operator]
            each.train(metric.training)
        return copies


def metric_places(module: Module) -> Iterator[tuple[Module, str, Module]]:
    """Where a module holds metrics: the parent, the name there, and the metric or collection."""
    for name, child in module._modules.items():
        if isinstance(child, (Metric, MetricCollection)):
            yield module, name, child
        elif child is not None:
            yield from metric_places(child)


def check_metrics(module: Module) -> None:
    """Refuses metrics whose state cannot be added up from parts.

    Raises:
        TypeError: Names the metric and its state.
    """
    for _, name, metric in metric_places(module):
        for each in _metrics_in(metric):
            for state, reduction in each._reductions.items():
                if not isinstance(each._defaults[state], list) and reduction not in _MERGEABLE:
                    raise TypeError(
                        f"strategy='dp' cannot add up the metric {name!r} ({type(each).__name__}) over devices: its"
                        f" state {state!r} is reduced by neither sum, max, min nor concatenation. Use a strategy with"
                        " a process per device, such as 'ddp'."
                    )


def log_together(
    module: LightningModule, metrics: ReplicaMetrics, recorders: Sequence[LogRecorder], num_samples: Sequence[int]
) -> None:
    """Logs once what all devices logged: means weighted by samples, sums, maxima and minima of all.

    Args:
        module: The module on the root device.
        metrics: The step's metrics, already merged.
        recorders: One per device.
        num_samples: How many samples each device had.
    """
    names = dict.fromkeys(call["name"] for recorder in recorders for call in recorder.calls)
    for name in names:
        calls = [
            (call, call.get("batch_size") or samples)
            for recorder, samples in zip(recorders, num_samples, strict=True)
            for call in recorder.calls
            if call["name"] == name
        ]
        together = {key: value for key, value in calls[-1][0].items() if key != "self"}
        values = [call["value"] for call, _ in calls]
        if isinstance(values[0], Metric):
            together["value"] = metrics.original_of(values[0])
        elif all(isinstance(value, (Tensor, numbers.Number)) for value in values):
            sizes = [size for _, size in calls]
            together["value"] = _combine(values, sizes, together.get("reduce_fx", "mean"), module.device)
            together["batch_size"] = sum(sizes)
        module.log(**together)


def _combine(values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any, device: torch.device) -> Tensor:
    stacked = torch.stack([torch.as_tensor(value).detach().to(device).squeeze() for value in values])
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction in _COMBINE:
        return _COMBINE[reduction](stacked)
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    return weighted_mean(stacked, [size / sum(sizes) for size in sizes])


def _metrics_in(module: Module) -> list[Metric]:
    return [each for each in module.modules() if isinstance(each, Metric)]


def _separate(module: Module) -> Module:
    """Turns off the sharing of states inside a collection: each of its metrics is merged by itself."""
    if isinstance(module, MetricCollection):
        module._enable_compute_groups = False
    return module


def _merge_states(metric: Metric, parts: Sequence[Metric]) -> None:
    for state, reduction in metric._reductions.items():
        values = [getattr(each, state) for each in (metric, *parts)]
        if isinstance(values[0], list):
            merged: Any = [item.to(metric.device) for value in values for item in value]
        else:
            assert callable(reduction)
            merged = reduction(torch.stack([value.to(metric.device) for value in values]))
        setattr(metric, state, merged)
    metric._update_count += 1
    metric._computed = None
