"""`ps_async`, `ps_ssp`: workers that push gradients to servers and pull weights, each at its own pace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_parallel.parameter_server.client import Client, Pulled, plain_options
from lit_parallel.parameter_server.hosted_servers import HostedServers
from lit_parallel.parameter_server.optimizer_state import State
from lit_parallel.parameter_server.store import check_staleness
from lit_parallel.strategies.parameter_server import why_not_cut, why_not_served

Place = Literal["server", "worker"]
_NUM_KEPT_PULLS = 10_000


class PushPullStrategy(DDPStrategy):
    """Parameter servers that workers talk to by messages.

    After each backward a worker pushes its gradients and pulls the new weights, as soon as it is at most `staleness`
    pushes ahead of the slowest worker. Validation, checkpoints and the end of training see one version on all ranks.

    The servers run the module's own optimizer; learning rates and other options are the worker's, so that schedulers
    work as ever. Clipping by value is exact; by norm it is by the norm of the worker's own gradient.

    Args:
        staleness: 0: all move in step, and gradients are averaged; a number: bounded (Ho et al. 2013); infinite:
            asynchronous. Above 0 each push is an update with 1/P of its gradient.
        servers: How many processes of their own serve, started on the first rank's host; None: a thread in each rank.
        update_on: "server"; or "worker", in step only: servers average gradients, and each rank updates its copy.
        options: As in Lightning's DDPStrategy.

    Raises:
        ValueError: An option is unknown, or the module or its optimizer cannot be served.
    """

    def __init__(
        self,
        *,
        staleness: float = math.inf,
        servers: int | None = None,
        update_on: Place = "server",
        **options: Any,
    ) -> None:
        check_staleness(staleness)
        if servers is not None and servers < 1:
            raise ValueError(f"servers={servers}: there must be at least one, or None for one in each rank.")
        if update_on not in get_args(Place):
            raise ValueError(f"Unknown update_on={update_on!r}; choose one of {', '.join(get_args(Place))}.")
        if update_on == "worker" and staleness > 0:
            raise ValueError("update_on='worker' needs staleness=0: otherwise no two workers would have equal weights.")
        super().__init__(**options)
        self.staleness, self.servers, self.update_on = staleness, servers, update_on
        #: What this rank's last pulls of this training have brought.
        self.pulls: deque[Pulled] = deque(maxlen=_NUM_KEPT_PULLS)
        self._client: Client | None = None
        self._hosted: HostedServers | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._last_state: dict[str, State] = {}

    @override
    def configure_ddp(self) -> None:
        """Leaves the module as it is, with the first rank's values: no gradients are reduced in backward."""
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._check_optimizers()
        self._names = {parameter: name for name, parameter in self._module.named_parameters()}
        self._hosted = HostedServers(self.servers, on_one_host=self.num_nodes == 1)
        self._client = Client(self._hosted.endpoints, dist.get_rank(), self._served(), self._hosted.keys)
        self.pulls.clear()
        self._give_weights()
        if self.staleness > 0:
            # Lightning's loop broadcasts in every batch, which would keep all ranks at one pace.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: _end_on_own_signal(trainer)  # type: ignore[method-assign]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._client is not None:
            self._give_weights()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        served = _ServedOptimizer(optimizer, self._exchange)
        return super().optimizer_step(served, closure, model, **kwargs)  # type: ignore[arg-type]

    @override
    def on_validation_start(self) -> None:
        self._agree()

    @override
    def on_train_end(self) -> None:
        self._agree()
        if self.update_on == "server" and self.is_global_zero:
            assert self._client is not None
            self._last_state = self._client.optimizer_state()  # a checkpoint may be saved after training
        dist.barrier()  # nobody closes a server before

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.update_on == "worker":
            return super().optimizer_state(optimizer)
        if not self.is_global_zero:
            return {}
        whole = optimizer.state_dict()
        state = self._last_state if self._client is None else self._client.optimizer_state()
        keys = [self._names[each] for group in optimizer.param_groups for each in group["params"]]
        return {**whole, "state": {keys.index(name): values for name, values in state.items()}}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # the options of the groups, and for workers all of it
        (optimizer,) = self.optimizers
        if self.update_on == "server":
            optimizer.state.clear()  # the servers' part
            if self.is_global_zero:
                assert self._client is not None
                keys = [self._names[each] for group in optimizer.param_groups for each in group["params"]]
                state = checkpoint["optimizer_states"][0]["state"]
                self._client.load_optimizer_state({keys[number]: values for number, values in state.items()})
            dist.barrier()

    @override
    def teardown(self) -> None:
        client, self._client = self._client, None
        hosted, self._hosted = self._hosted, None
        if client is not None:
            client.close()
        if hosted is not None:
            hosted.close()
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: object) -> None:
        """Registers nothing: `lit_parallel.strategies.register` does."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _give_weights(self) -> None:
        """Lets the servers begin with the first rank's weights; all ranks call it."""
        assert self._client is not None
        dist.barrier()  # nobody has a push on its way
        if self.is_global_zero:
            served = self.optimizers[0] if self.update_on == "server" else None
            self._client.init(dist.get_world_size(), self.staleness, served, self._names)
        dist.barrier()
        self._client.enter()
        dist.barrier()

    def _exchange(self, optimizer: Optimizer) -> None:
        """Pushes gradients and pulls weights, or mean gradients."""
        assert self._client is not None
        parameters = {self._names[each]: each for group in optimizer.param_groups for each in group["params"]}
        gradients = {name: each.grad for name, each in parameters.items()}
        self._client.push(gradients, [plain_options(group) for group in optimizer.param_groups])
        if self.update_on == "server":
            pulled, _ = self._client.pull(self._served())
        else:
            mean = {name: torch.empty_like(each) for name, each in parameters.items()}
            pulled, present = self._client.pull(mean)
            for name, each in parameters.items():
                each.grad = mean[name] if name in present else None
            optimizer.step()
        self.pulls.append(pulled)

    def _agree(self) -> None:
        """Brings all ranks to the servers' newest version, once all have pushed."""
        if self._client is None:
            return
        self._client.leave()  # all may have pushed different numbers of times
        dist.barrier()
        if self.update_on == "server":
            self._client.pull(self._served())
        for buffer in self._module.buffers():
            dist.broadcast(buffer, 0)
        dist.barrier()  # nobody enters before all have pulled
        self._client.enter()
        dist.barrier()  # nobody pushes before all have entered

    def _served(self) -> dict[str, Tensor]:
        (optimizer,) = self.optimizers
        return {self._names[each]: each.detach() for group in optimizer.param_groups for each in group["params"]}

    def _check_optimizers(self) -> None:
        name = type(self).__name__
        if self.root_device.type != "cpu":
            raise ValueError(f"{name} trains on CPU ranks, and these are on {self.root_device.type}.")
        if not self._module.automatic_optimization:
            raise ValueError(f"{name} needs automatic optimization; strategy='ring' and others do manual optimization.")
        if len(self.optimizers) != 1:
            raise ValueError(f"{name} serves one optimizer, and there are {len(self.optimizers)}; use strategy='ring'.")
        find_problem = why_not_served if self.update_on == "server" else why_not_cut
        if problem := find_problem(self._module, self.optimizers[0]):
            raise ValueError(f"{name} cannot serve: {problem}. Use strategy='ring', or change the optimizer.")
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            raise ValueError(f"{name} does not scale losses: use precision='bf16-mixed' in place of '16-mixed'.")


class _ServedOptimizer:
    """The module's optimizer, but its step takes place at the servers."""

    def __init__(self, optimizer: Optimizer, exchange: Callable[[Optimizer], None]) -> None:
        self._optimizer, self._exchange = optimizer, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._exchange(self._optimizer)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a missing step
        return result


def _end_on_own_signal(trainer: Trainer) -> None:
    """What Lightning's loop does in each batch, without asking the first rank."""
    if trainer.received_sigterm:
        raise SIGTERMException
