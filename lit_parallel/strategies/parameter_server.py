"""`strategy="ps"`: a synchronous parameter server whose shards live with the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lit_parallel.parameter_server import SharedWeights
from lit_parallel.strategies.gradient_sync import make_local_hook
from lit_parallel.strategies.served_optimizer import why_not_served
from lit_parallel.strategies.synchronous import SynchronousStrategy
from lit_parallel.transports import NoRoomError, SharedMemoryTransport, Transport

UpdateOn = Literal["auto", "server", "worker"]


class ParameterServerStrategy(SynchronousStrategy):
    """`strategy="ps"`: synchronous parameter server, its shards on the workers (schedule `sharded`).

    Args:
        update_on: "server": the ranks of one host have their weights in one memory, and each rank updates its shard
            with the module's own optimizer, which splits the optimizer's work and state over the ranks; "worker":
            servers only add, and every rank updates its own copy; "auto": the first where it is possible (CPU ranks
            on one host, one element-wise optimizer, automatic optimization, no loss scaling), else the second.
        options: As in `SynchronousStrategy`.

    Raises:
        ValueError: `update_on` is unknown, or "server" where that is not possible.
    """

    algorithm = "ps"

    def __init__(self, *, update_on: UpdateOn = "auto", **options: Any) -> None:
        if update_on not in get_args(UpdateOn):
            raise ValueError(f"Unknown update_on={update_on!r}; choose one of {', '.join(get_args(UpdateOn))}.")
        super().__init__(**options)
        self.update_on = update_on
        self._transport: Transport | None = None
        self._weights: SharedWeights | None = None

    @override
    def _register_ddp_hooks(self) -> None:
        """Waits for the optimizers: which hook it is depends on them."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._weights = None
        self._transport = transport = super()._make_transport()
        reason = self._why_not_on_server(transport)
        if not reason and self.update_on != "worker":
            assert isinstance(transport, SharedMemoryTransport)
            try:
                self._weights = SharedWeights(dict(self._module.named_parameters()), self.optimizers[0], transport)
            except NoRoomError as error:
                reason = str(error)
        if self._weights is not None:
            self._ddp.register_comm_hook(state=None, hook=make_local_hook(self._weights.add_bucket))
            # Lightning clips what the optimizer has, which is this rank's shard: the norm is that of all shards.
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            return
        if self.update_on == "server":
            raise ValueError(f"update_on='server' is not possible: {reason}. Use update_on='worker' or 'auto'.")
        if self.update_on == "auto":
            rank_zero_info(f"Every rank updates its own weights: {reason}.")
        super()._register_ddp_hooks()

    @override
    def _make_transport(self) -> Transport:
        assert self._transport is not None
        return self._transport

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        weights = self._weights
        if weights is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def compute_and_average() -> Any:
            result = closure()
            weights.average_gradients()
            return result

        result = super().optimizer_step(optimizer, compute_and_average, model, **kwargs)
        weights.finish_step()
        return result

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return super().optimizer_state(optimizer) if self._weights is None else self._weights.optimizer_state()

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._weights is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._weights.load_optimizer_state(checkpoint["optimizer_states"][0])

    @override
    def teardown(self) -> None:
        transport, self._transport = self._transport, None
        if self._weights is not None:  # and kept: a checkpoint may be saved after training
            self._weights.close()
            vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        if transport is not None:
            transport.close()
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _ddp(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._weights is not None
        parameters = self.precision_plugin.main_params(optimizer)
        norm = self._weights.gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    def _why_not_on_server(self, transport: Transport) -> str:
        """Why servers cannot update the weights, or ""."""
        if not isinstance(transport, SharedMemoryTransport):
            return "the ranks do not share memory"
        if not self._module.automatic_optimization:
            return "the module optimizes manually, so its optimizers must hold whole parameters"
        if len(self.optimizers) != 1:
            return f"there are {len(self.optimizers)} optimizers, and servers run one"
        if problem := why_not_served(self._module, self.optimizers[0]):
            return problem
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            return "loss scaling must see all gradients before a step"
        return ""
