"""Data parallelism in one process: `strategy="dp"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lit_parallel.strategies.data_parallel.metrics import LogRecorder, ReplicaMetrics, check_metrics, log_together
from lit_parallel.strategies.data_parallel.replicate import Replica, add_gradients
from lit_parallel.strategies.data_parallel.scatter import Shard, gather, scatter, weighted_mean
from lit_parallel.strategies.single import OneNode

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import LayerSync


class DataParallelStrategy(OneNode, ParallelStrategy):
    """`strategy="dp"`: one process, one thread and one replica of the module per device.

    A step splits its batch over the devices, runs forward and backward of all replicas in threads, and adds the
    gradients into the first device's module, which is the real one: the optimizer, checkpoints and callbacks see
    nothing else. The loss is the whole batch's: each shard's counts by its number of samples. `self.log` and
    torchmetrics see each sample once. Batch normalisation uses each shard's own statistics in training, and the first
    device's running averages are kept.

    It needs no launcher and works in notebooks. It is the simplest way, not the fastest: prefer a strategy with a
    process per device where one can be used.
    """

    name = "dp"

    def __init__(self) -> None:
        super().__init__()
        self._layer_sync: LayerSync | None = None  # set by the Trainer for sync_batchnorm=True
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = torch.get_num_threads()
        self._metric_copies: dict[int, list[Module]] = {}

    @property
    @override
    def root_device(self) -> torch.device:
        return self._devices[0]

    @property
    @override
    def global_rank(self) -> int:
        return 0

    @property
    @override
    def local_rank(self) -> int:
        return 0

    @property
    @override
    def world_size(self) -> int:
        return 1

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        """Nobody to wait for."""

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        _check_supported(self.lightning_module, self._layer_sync)
        super().setup(trainer)
        # The replicas share the threads that one device would have: more would compete for the same cores.
        self._num_threads = torch.get_num_threads()
        threads = max(1, self._num_threads // len(self._devices))
        torch.set_num_threads(threads)
        self._pool = ThreadPoolExecutor(len(self._devices), "dp-replica", torch.set_num_threads, (threads,))

    @override
    def teardown(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            torch.set_num_threads(self._num_threads)
        self._metric_copies.clear()
        super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._run_step("training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run_step("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run_step("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run_step("predict_step", args, kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: object) -> None:
        """Registers nothing: `lit_parallel.strategies.register` does."""

    @property
    def _devices(self) -> list[torch.device]:
        assert self.parallel_devices is not None
        return self.parallel_devices

    def _run_step(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a step of the module on all devices and returns what one device would return for the whole batch."""
        module = self.lightning_module
        assert module is not None
        shards = scatter(args, self._devices)
        if len(shards) == 1:
            return getattr(module, method)(*args, **kwargs)

        metrics = ReplicaMetrics(module, self._devices, self._metric_copies)
        recorders = [LogRecorder() for _ in shards]
        replicas = [Replica(module, shard.device, metrics.on(i)) for i, shard in enumerate(shards[1:], start=1)]
        modules = [module, *(replica.module for replica in replicas)]
        with metrics.in_place():
            try:
                for each, recorder in zip(modules, recorders, strict=True):
                    each.__dict__["log"] = recorder
                outputs = self._run_parallel(
                    [_bind_step(each, method, shard, kwargs) for each, shard in zip(modules, shards, strict=True)]
                )
            finally:
                module.__dict__.pop("log", None)
        metrics.merge()
        num_samples = [shard.num_samples for shard in shards]
        log_together(module, metrics, recorders, num_samples)

        weights = [samples / sum(num_samples) for samples in num_samples]
        if method != "training_step" or all(output is None for output in outputs):
            return gather(outputs, weights, self.root_device)
        losses = [output["loss"] if isinstance(output, Mapping) else output for output in outputs]
        if not all(isinstance(loss, Tensor) for loss in losses):
            raise TypeError(
                "strategy='dp': training_step must return a loss (a tensor, or a mapping with a tensor 'loss') on all"
                f" devices or None on all of them; got {[type(loss).__name__ for loss in losses]}."
            )
        loss = self._loss_of_all(losses, weights, replicas)
        if not isinstance(outputs[0], Mapping):
            return loss
        rest = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
        return {"loss": loss, **gather(rest, weights, self.root_device)}

    def _loss_of_all(self, losses: list[Tensor], weights: list[float], replicas: list[Replica]) -> Tensor:
        """The whole batch's loss. Its backward runs the backward of every device in threads and adds the gradients."""
        module = self.lightning_module
        assert module is not None

        def backward(gradient: Tensor) -> None:
            self._run_parallel(
                [
                    _bind_backward(loss, gradient.to(loss.device) * weight)
                    for loss, weight in zip(losses, weights, strict=True)
                ]
            )
            add_gradients(module, replicas)

        value = weighted_mean(torch.stack([loss.detach().to(self.root_device) for loss in losses]), weights)
        if not torch.is_grad_enabled():
            return value
        anchor = torch.zeros((), device=self.root_device, requires_grad=True)
        result: Tensor = _RunBackward.apply(value, anchor, backward)
        return result

    def _run_parallel(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Runs the first call here and the others in threads, and raises the first error once all have ended."""
        assert self._pool is not None
        in_context = _carry_context(self.root_device.type)
        futures = [self._pool.submit(in_context, call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            wait(futures)
        return [first, *(future.result() for future in futures)]


class _RunBackward(torch.autograd.Function):
    """Passes a value on, and calls a function with its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.run_backward = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.run_backward(gradient)
        return None, None, None


def _bind_step(module: Module, method: str, shard: Shard, kwargs: dict[str, Any]) -> Callable[[], Any]:
    def run() -> Any:
        # Each thread's current GPU is its shard's, for tensors that the step makes.
        with torch.cuda.device(shard.device) if shard.device.type == "cuda" else nullcontext():
            return getattr(module, method)(*shard.arguments, **kwargs)

    return run


def _bind_backward(loss: Tensor, gradient: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.backward(loss, gradient)


def _carry_context(device_type: str) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that runs a call under this thread's modes of torch, which other threads do not inherit."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)

    def run(call: Callable[[], Any]) -> Any:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast(device_type, dtype, enabled=autocast),
        ):
            return call()

    return run


def _check_supported(module: LightningModule, layer_sync: LayerSync | None) -> None:
    """Refuses, before anything runs, what cannot work in replicas.

    Raises:
        ValueError: Says what, and what to do instead.
    """
    use_processes = "use a strategy with a process per device, such as 'ring' or 'ddp'."
    if not module.automatic_optimization:
        raise ValueError(
            f"strategy='dp' works with automatic optimization only; for manual optimization {use_processes}"
        )
    if layer_sync is not None or any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules()):
        raise ValueError(
            "strategy='dp' cannot synchronise batch normalisation: its replicas are not ranks. Set"
            f" sync_batchnorm=False, or {use_processes}"
        )
    for name, each in module.named_modules():
        if isinstance(each, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)) or each._compiled_call_impl:
            raise ValueError(
                f"strategy='dp' cannot replicate a compiled module ({name or type(module).__name__}). Leave out"
                f" compilation, or {use_processes}"
            )
        if getattr(each, "sparse", False) is True:
            raise ValueError(
                f"strategy='dp' cannot add sparse gradients ({name}). Set sparse=False, or {use_processes}"
            )
    check_metrics(module)
