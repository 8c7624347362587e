"""`ps_async`, `ps_ssp`: workers that push gradients to servers and pull weights, each at its own pace."""

from __future__ import annotations

import contextlib
import io
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from lit_parallel.parameter_server.elastic_group import BACKEND, ElasticGroup, elastic_group, register_backend
from lit_parallel.parameter_server.hosted_servers import HostedServers
from lit_parallel.parameter_server.optimizer_state import State
from lit_parallel.parameter_server.store import check_staleness
from lit_parallel.parameter_server.wire import CurveKeys
from lit_parallel.strategies.served_optimizer import ServedOptimizer, why_not_cut, why_not_served, why_not_stepped
from lit_parallel.strategies.surviving_launcher import SurvivingLauncher

Place = Literal["server", "worker"]
_NUM_KEPT_PULLS = 10_000


class PushPullStrategy(DDPStrategy):
    """Parameter servers that workers talk to by messages.

    In backward a worker pushes its gradients, and then pulls the new weights, as soon as it is at most `staleness`
    pushes ahead of the slowest worker. Validation, checkpoints and the end of training see one version on all ranks.

    The servers run the module's own optimizer; learning rates and other options are the worker's, so that schedulers
    work as ever. Clipping by value is exact; by norm it is so with `staleness=0`, and else by the norm of the worker's
    own gradient.

    With `staleness` above 0 training survives: it goes on without a worker that ends (but for the first rank), takes in
    one that is started again at the next epoch, and starts a server that ended again from its snapshot (across hosts
    only with `servers`).

    Args:
        staleness: 0: all move in step, and gradients are averaged; a number: bounded (Ho et al. 2013); infinite:
            asynchronous. Above 0 each push is a step of this worker's optimizer, with 1/P of its learning rate.
        servers: How many processes of their own serve, started on the first rank's host; or the addresses of servers
            started by hand; None: a thread in each rank.
        server_keys: File with the keys of servers at tcp addresses.
        update_on: "server"; or "worker", in step only: servers average gradients, and each rank updates its copy.
        options: As in Lightning's DDPStrategy.

    Raises:
        ValueError: An option is unknown, or the module or its optimizer cannot be served.
    """

    def __init__(
        self,
        *,
        staleness: float = math.inf,
        servers: int | Sequence[str] | None = None,
        server_keys: str | Path | None = None,
        update_on: Place = "server",
        **options: Any,
    ) -> None:
        check_staleness(staleness)
        if isinstance(servers, str):
            raise ValueError(f"servers={servers!r}: give a list of addresses, or a number.")
        if servers is not None and (servers if isinstance(servers, int) else len(servers)) < 1:
            raise ValueError(f"servers={servers}: there must be at least one, or None for one in each rank.")
        if update_on not in get_args(Place):
            raise ValueError(f"Unknown update_on={update_on!r}; choose one of {', '.join(get_args(Place))}.")
        if update_on == "worker" and staleness > 0:
            raise ValueError("update_on='worker' needs staleness=0: otherwise no two workers would have equal weights.")
        self.staleness, self.servers, self.update_on = staleness, servers, update_on
        self._server_keys = _read_keys(servers, server_keys)
        super().__init__(**options)
        #: What this rank's last pulls of this training have brought.
        self.pulls: deque[Pulled] = deque(maxlen=_NUM_KEPT_PULLS)
        self._client: Client | None = None
        self._hosted: HostedServers | None = None
        self._group: ElasticGroup | None = None
        self._welcome: dict[str, Any] | None = None  # what a rank that has come back was told, until it is in
        self._is_welcoming = self._is_last_backward = self._has_failed = False
        self._max_norm: float | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._hooks: list[Any] = []
        self._last_state: dict[str, State] = {}

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._may_survive:
            assert self.cluster_environment is not None
            self._launcher = SurvivingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        if self._may_survive and self._process_group_backend is None:
            register_backend()
            self._process_group_backend = BACKEND
        super().setup_environment()
        # None too where the process group was made before, by whoever started the ranks.
        self._group = elastic_group() if self._may_survive else None
        if self._group is not None and self._group.is_alone:
            self._welcome = torch.load(io.BytesIO(self._group.join()), weights_only=False)
            # As though it had been given as `ckpt_path`.
            self._module.trainer._checkpoint_connector._loaded_checkpoint = self._welcome["checkpoint"]

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        # Before it is in, a rank that has come back has only itself to ask.
        return obj if self._welcome is not None else super().broadcast(obj, src)

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
        addresses, keys = self._find_servers()
        self._client = Client(
            addresses,
            self.global_rank,
            self._served(),
            keys,
            check_hope=None if self._group is None else self._group.check,
            life=1 if self._group is None else self._group.life,
        )
        self.pulls.clear()
        if self._welcome is None:
            self._give_weights()
        if self.staleness > 0:
            # Lightning's loop broadcasts in every batch, which would keep all ranks at one pace.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: _end_on_own_signal(trainer)  # type: ignore[method-assign]
        else:
            self.precision_plugin.clip_grad_by_norm = self._note_max_norm  # type: ignore[method-assign]
        if trainer.gradient_clip_val is None:  # else gradients still change after backward
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._push_early)
                for group in self.optimizers[0].param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._client is not None:
            self._give_weights()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx > 0 or self._group is None:
            return
        assert self._client is not None
        if self._welcome is None:
            self._agree()
            self._group.admit(self._make_welcome)
        else:
            self._group.enter()
            self._client.enter(self._welcome["clock"])
            self._move_weights()
            self._client.pull(self._served())
            self._welcome = None

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        served = ServedOptimizer(optimizer, self._pushing_early, self._exchange)
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
        if not self._is_welcoming:
            self._agree()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.update_on == "worker":
            return super().optimizer_state(optimizer)
        if not self.is_global_zero:
            return {}
        whole = optimizer.state_dict()
        if self._is_welcoming:
            return whole
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
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True

    @override
    def teardown(self) -> None:
        client, self._client = self._client, None
        hosted, self._hosted = self._hosted, None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        if client is not None:
            for weight in self._served() if client.segment is not None else ():
                parameter = self._module.get_parameter(weight)
                parameter.data = parameter.data.clone()  # its own memory again
            client.close()
        if hosted is not None:
            hosted.close(failed=self._has_failed)
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: object) -> None:
        """Registers nothing: `lit_parallel.strategies.register` does."""

    @property
    def _may_survive(self) -> bool:
        """Whether some may end without the others: nobody waits for them, and their servers can be had again."""
        has_servers = self.servers is not None or self.num_nodes == 1
        return self.staleness > 0 and has_servers and self._start_method == "popen"

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _find_servers(self) -> tuple[Sequence[str], CurveKeys | None]:
        """Addresses and keys of the servers, which are started unless they were by hand."""
        if self._welcome is not None:
            return self._welcome["servers"]  # type: ignore[no-any-return]
        if isinstance(self.servers, Sequence):
            return self.servers, self._server_keys
        assert self.cluster_environment is not None
        self._hosted = HostedServers(
            self.servers,
            on_one_host=self.num_nodes == 1,
            main_address=self.cluster_environment.main_address,
            survives=self._group is not None,
        )
        return self._hosted.endpoints, self._hosted.keys

    def _give_weights(self) -> None:
        """Lets the servers begin with the first rank's weights; all ranks call it."""
        assert self._client is not None
        dist.barrier()  # nobody has a push on its way
        if self.is_global_zero:
            served = self.optimizers[0] if self.update_on == "server" else None
            self._client.init(self.world_size, self.staleness, served, self._names)
        dist.barrier()
        self._client.enter(0)
        self._move_weights()
        dist.barrier()

    def _move_weights(self) -> None:
        """Into the memory in which servers of this host write, so that a pull needs no copy."""
        assert self._client is not None
        if self._client.segment is not None and self.update_on == "server":
            for name, weight in self._served().items():
                shared = self._client.segment.weights[name]
                shared.copy_(weight)
                self._module.get_parameter(name).data = shared

    def _make_welcome(self) -> bytes:
        """On the first rank: all that a rank needs that has come back."""
        assert self._client is not None
        self._is_welcoming = True
        checkpoint = self._module.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._is_welcoming = False
        servers = (
            (self.servers, self._server_keys) if self._hosted is None else (self._hosted.endpoints, self._hosted.keys)
        )
        buffer = io.BytesIO()
        torch.save({"checkpoint": checkpoint, "servers": servers, "clock": self._client.clock}, buffer)
        return buffer.getvalue()

    @contextlib.contextmanager
    def _pushing_early(self) -> Iterator[None]:
        """In the backward that is the last before the step, gradients are pushed as soon as they are there."""
        self._is_last_backward = True
        try:
            yield
        finally:
            self._is_last_backward = False

    def _push_early(self, parameter: Tensor) -> None:
        if self._is_last_backward and parameter.grad is not None:
            assert self._client is not None
            assert isinstance(parameter, nn.Parameter)
            self._client.push_part(self._names[parameter], parameter.grad)

    def _note_max_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of Lightning's clipping: it is the mean gradient that has to be clipped."""
        self._max_norm = float(clip_val)

    def _exchange(self, optimizer: Optimizer) -> None:
        """Pushes gradients and pulls weights, or mean gradients."""
        assert self._client is not None
        max_norm, self._max_norm = self._max_norm, None
        parameters = {self._names[each]: each for group in optimizer.param_groups for each in group["params"]}
        gradients = {name: each.grad for name, each in parameters.items()}
        options = [plain_options(group) for group in optimizer.param_groups]
        if self.update_on == "server":
            self._client.push(gradients, options, max_norm)
            pulled, _ = self._client.pull(self._served())
        else:
            self._client.push(gradients, options)
            mean = {name: torch.empty_like(each) for name, each in parameters.items()}
            pulled, present = self._client.pull(mean)
            for name, each in parameters.items():
                each.grad = mean[name] if name in present else None
            if max_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), max_norm)
            optimizer.step()
        self.pulls.append(pulled)

    def _agree(self) -> None:
        """Brings all ranks to the servers' newest version, once all have pushed."""
        if self._client is None or self._welcome is not None:
            return
        self._client.leave()  # all may have pushed different numbers of times
        clock = torch.tensor(self._client.clock)
        dist.all_reduce(clock, dist.ReduceOp.MAX)
        if self.update_on == "server":
            # More than once only if a server is started again in between, from an older version.
            while not self._pull_one_version():
                pass
        for buffer in self._module.buffers():
            dist.broadcast(buffer, 0)
        self._client.enter(int(clock))
        dist.barrier()  # nobody pushes before all have entered

    def _pull_one_version(self) -> bool:
        """Whether all ranks have pulled the same; also, nobody enters before all have pulled."""
        assert self._client is not None
        versions = torch.tensor(self._client.pull(self._served())[0].versions)
        extremes = torch.stack([versions, -versions])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        return torch.equal(extremes[0], -extremes[1])

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
        if problem := find_problem(self._module, self.optimizers[0]) or why_not_stepped(self.optimizers[0]):
            raise ValueError(f"{name} cannot serve: {problem}. Use strategy='ring', or change the optimizer.")
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            raise ValueError(f"{name} does not scale losses: use precision='bf16-mixed' in place of '16-mixed'.")


def _read_keys(servers: int | Sequence[str] | None, file: str | Path | None) -> CurveKeys | None:
    """The keys of servers that were started by hand.

    Raises:
        ValueError: They are missing, not needed, or no keys.
    """
    needs_keys = isinstance(servers, Sequence) and any(each.startswith("tcp:") for each in servers)
    if needs_keys != (file is not None):
        raise ValueError("server_keys is the file of keys of servers at tcp addresses: give both, or neither.")
    if file is None:
        return None
    try:
        return CurveKeys.from_json(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"server_keys={str(file)!r} cannot be read: {error}.") from error


def _end_on_own_signal(trainer: Trainer) -> None:
    """What Lightning's loop does in each batch, without asking the first rank."""
    if trainer.received_sigterm:
        raise SIGTERMException
