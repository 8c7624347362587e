"""Synchronous data-parallel strategies: Lightning's DDP with the gradients summed by a schedule of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lit_parallel.schedules.registry import get_algorithm
from lit_parallel.strategies.gradient_sync import GradientSync
from lit_parallel.transports import (
    NoRoomError,
    OtherHostError,
    ProcessGroupTransport,
    SharedMemoryTransport,
    Transport,
)

if TYPE_CHECKING:
    import torch
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

TransportName = Literal["auto", "shared_memory", "process_group"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class SynchronousStrategy(DDPStrategy):
    """Base of all strategies that run a registered algorithm on every bucket of gradients.

    What torch's DistributedDataParallel does well stays with it: bucketing, readiness, accumulation, unused
    parameters, static graphs. At two ranks the weights are bit-identical to Lightning's "ddp".

    Args:
        transport: How bytes move between ranks. "shared_memory": each rank reads the others' memory, on one host;
            "process_group": messages of torch.distributed; "auto" picks the first for CPU ranks that are all on one
            host, else the second.
        overlap: Synchronise a bucket while backward computes the next one. None picks what was measured to be
            quicker: on, except for CPU ranks on one host, where ranks and messages share the same cores.
        find_unused_parameters: Allow parameters that a step does not use, at the cost of a walk over the graph.
        static_graph: Promise that every step uses the same parameters in the same order.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        timeout: How long a message may take before training ends with an error.
        process_group_backend: "gloo", "nccl", ...; None picks by device.
        start_method: How the processes of one host are started: "popen" runs the script again for every rank,
            "spawn", "fork" and "forkserver" use multiprocessing; a notebook needs "fork".
        accelerator: As in Lightning's DDPStrategy, like all that follow.
        parallel_devices: The devices of this host's ranks.
        cluster_environment: Where ranks and addresses come from.
        checkpoint_io: How checkpoints are written.
        precision_plugin: How precision is handled.
    """

    #: Name of the algorithm in the registry.
    algorithm: str

    def __init__(
        self,
        *,
        transport: TransportName = "auto",
        overlap: bool | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if transport not in get_args(TransportName):
            raise ValueError(f"Unknown transport {transport!r}; choose one of {', '.join(get_args(TransportName))}.")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,  # one copy of the gradients, not two
        )
        self.transport, self.overlap = transport, overlap
        self._gradient_sync: GradientSync | None = None

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only; ours are the strategy on every device.
        assert isinstance(self.model, DistributedDataParallel)
        schedule = get_algorithm(self.algorithm).make_schedule(dist.get_world_size())
        overlap = (self.root_device.type == "cuda" or self.num_nodes > 1) if self.overlap is None else self.overlap
        self._gradient_sync = GradientSync(self._make_transport(), schedule, self.root_device, overlap=overlap)
        self.model.register_comm_hook(state=None, hook=self._gradient_sync.make_hook())

    def _make_transport(self) -> Transport:
        """All ranks make the same kind: the errors below are raised on all of them alike.

        Raises:
            ValueError: Shared memory was asked for and cannot be used.
        """
        assert self.model is not None
        assert self._timeout is not None
        reason: Exception | None = None
        if self.transport != "process_group" and self.root_device.type == "cpu":
            gradients = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
            try:
                # Twice: DDP makes new buckets after the first step, before it frees the old ones.
                return SharedMemoryTransport(2 * gradients, self._timeout)
            except NoRoomError as error:
                reason = error
                if self.transport == "auto":
                    rank_zero_warn(f"Gradients go through the process group, not shared memory: {error}.")
            except OtherHostError as error:
                reason = error
        if self.transport == "shared_memory":
            reason = reason or ValueError(f"it joins CPU ranks, and these are on {self.root_device.type}")
            raise ValueError(f"transport='shared_memory' cannot be used: {reason}. Use transport='auto'.") from reason
        return ProcessGroupTransport(self._timeout, self._process_group_backend)

    @override
    def teardown(self) -> None:
        # Also called after an exception: closing tells the peers, which else would wait for the timeout.
        gradient_sync, self._gradient_sync = self._gradient_sync, None
        if gradient_sync is not None:
            gradient_sync.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: object) -> None:
        """Registers nothing: `lit_parallel.strategies.register` does; the inherited method would add "ddp" again."""


class AllReduceStrategy(SynchronousStrategy):
    """`strategy="allreduce"`: the tutorial's all-reduce, through the first rank (schedule `central`)."""

    algorithm = "allreduce"


class RingStrategy(SynchronousStrategy):
    """`strategy="ring"`: ring all-reduce, optimal in bytes (schedule `ring`)."""

    algorithm = "ring"


class DoubleRingStrategy(SynchronousStrategy):
    """`strategy="double_ring"`: two rings in opposite directions (schedule `double_ring`)."""

    algorithm = "double_ring"


class TreeStrategy(SynchronousStrategy):
    """`strategy="tree"`: binomial tree, few steps (schedule `tree`)."""

    algorithm = "tree"


class HalvingDoublingStrategy(SynchronousStrategy):
    """`strategy="halving_doubling"`: a ring's bytes in a tree's steps (schedule `halving_doubling`)."""

    algorithm = "halving_doubling"


class AlgorithmStrategy(SynchronousStrategy):
    """Any registered algorithm, by name: what `register_algorithm` gives to the Trainer.

    Args:
        algorithm: A name of the registry.
        options: As in `SynchronousStrategy`.

    Raises:
        ValueError: No algorithm has that name.
    """

    def __init__(self, algorithm: str, **options: object) -> None:
        self.algorithm = get_algorithm(algorithm).name
        super().__init__(**options)  # type: ignore[arg-type]
