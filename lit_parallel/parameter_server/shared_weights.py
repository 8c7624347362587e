"""A parameter server in every rank of one host, whose weights are one memory for all: nothing is pushed or pulled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_parallel.parameter_server.average import average_into
from lit_parallel.parameter_server.optimizer_state import cut_state, gather_state, in_memory_order
from lit_parallel.parameter_server.partition import plan_shards
from lit_parallel.transports import NoRoomError, SharedMemoryTransport


class SharedWeights:
    """The weights of all ranks of a host in one memory, of which each rank updates its shard.

    In a step each rank averages its shard of all ranks' gradients, straight from the peers' memory, and updates its
    shard of the weights in place. The optimizer's work and state are split over the ranks: it gets this rank's pieces
    of the parameters in place of the parameters. Source: Li et al. 2014, with the messages left out.

    Cost per rank and step: a shard of every rank's gradients is read, one is written; two meetings of all ranks.

    Args:
        parameters: By name, the same on all ranks, and dense. They are moved into shared memory, with rank 0's values.
        optimizer: One of `ELEMENT_WISE`, over some of these parameters, without state. Changed in place.
        transport: Between the ranks.

    Raises:
        NoRoomError: There is not enough shared memory.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, transport: SharedMemoryTransport
    ) -> None:
        self._transport, self._optimizer, self._parameters = transport, optimizer, dict(parameters)
        try:
            self._move_weights()
        except NoRoomError:
            self.close()
            raise
        names = {parameter: name for name, parameter in self._parameters.items()}
        self._groups = [[names[each] for each in group["params"]] for group in optimizer.param_groups]
        updated = {name: self._parameters[name] for group in self._groups for name in group}
        sizes = {name: (each.numel(), each.itemsize) for name, each in updated.items()}
        self._pieces = {
            piece: nn.Parameter(in_memory_order(updated[piece.key].detach())[piece.start : piece.stop])
            for piece in plan_shards(sizes, transport.world_size)[transport.rank]
        }
        for group, keys in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [tensor for piece, tensor in self._pieces.items() if piece.key in keys]
        self._buckets: dict[int, list[Tensor]] = {}  # by address: that bucket of this rank, then of the others
        self._is_first_step = True

    def add_bucket(self, bucket: Tensor) -> None:
        """Takes notice of gradients once they are computed; all ranks call it with the same buckets, in order."""
        if bucket.data_ptr() not in self._buckets:
            theirs = self._transport.share(bucket)
            self._buckets[bucket.data_ptr()] = [bucket, *theirs.values()]

    def average_gradients(self) -> None:
        """Gives this rank's pieces the mean of all ranks' gradients, once all ranks have theirs."""
        self._transport.barrier()
        for piece, tensor in self._pieces.items():
            gradient = self._parameters[piece.key].grad
            if gradient is not None:  # else no rank has used the parameter
                tensor.grad = own = in_memory_order(gradient)[piece.start : piece.stop]
                average_into(own, self._peers_of(own), self._transport.world_size)

    def finish_step(self) -> None:
        """Forgets the gradients, and blocks until all ranks have updated their shards."""
        if self._is_first_step:
            # DistributedDataParallel makes new buckets before the second step, and these must not outlive it.
            self._buckets.clear()
            self._is_first_step = False
        for tensor in (*self._parameters.values(), *self._pieces.values()):
            tensor.grad = None
        self._transport.barrier()

    def gradient_norm(self) -> Tensor:
        """Norm of the mean gradient over all shards, in float64; all ranks call it."""
        gradients = (each.grad for each in self._pieces.values() if each.grad is not None)
        square = sum((each.double().square().sum() for each in gradients), torch.zeros((), dtype=torch.float64))
        squares = [torch.zeros_like(square) for _ in range(self._transport.world_size)]
        dist.all_gather(squares, square)
        return torch.stack(squares).sum().sqrt()

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's state on rank 0, as one device would save it, else {}; all ranks call it."""
        own = {piece: dict(self._optimizer.state[tensor]) for piece, tensor in self._pieces.items()}
        by_key = gather_state(own, self._detached())
        if self._transport.rank != 0:
            return {}
        keys = [key for group in self._groups for key in group]
        return {
            "state": {keys.index(key): values for key, values in by_key.items()},
            "param_groups": self._number_groups(self._optimizer.param_groups, [len(each) for each in self._groups]),
        }

    def load_optimizer_state(self, whole: Mapping[str, Any]) -> None:
        """Takes this rank's part of a state as `optimizer_state`, or an optimizer of one device, gives it."""
        keys = [key for group in self._groups for key in group]
        by_key = {keys[number]: values for number, values in whole["state"].items()}
        state = enumerate(cut_state(by_key, self._pieces, self._detached()).values())
        lengths = [len(group["params"]) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(
            {
                "state": {number: values for number, values in state if values},
                "param_groups": self._number_groups(whole["param_groups"], lengths),
            }
        )

    def close(self) -> None:
        """Gives this rank weights of its own again."""
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()

    def _move_weights(self) -> None:
        parameters = self._parameters.values()
        for dtype in sorted({each.dtype for each in parameters}, key=str):
            own = torch.cat([in_memory_order(each.detach()) for each in parameters if each.dtype == dtype])
            weights = {self._transport.rank: own, **self._transport.share(own)}[0]
            offset = 0
            for parameter in parameters:
                if parameter.dtype == dtype:
                    parameter.data = weights.as_strided(parameter.shape, parameter.stride(), offset)
                    offset += parameter.numel()

    def _peers_of(self, gradient: Tensor) -> list[Tensor]:
        """The other ranks' part of a bucket that corresponds to a part of this rank's."""
        for own, *theirs in self._buckets.values():
            first, rest = divmod(gradient.data_ptr() - own.data_ptr(), own.itemsize)
            if gradient.dtype == own.dtype and rest == 0 and 0 <= first < len(own):
                return [each[first : first + len(gradient)] for each in theirs]
        raise AssertionError("a gradient lies outside of all buckets")

    def _detached(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @staticmethod
    def _number_groups(groups: list[dict[str, Any]], lengths: list[int]) -> list[dict[str, Any]]:
        """The groups with `lengths` parameters each, numbered one after the other."""
        firsts = [sum(lengths[:index]) for index in range(len(lengths))]
        return [
            {**group, "params": list(range(first, first + length))}
            for group, first, length in zip(groups, firsts, lengths, strict=True)
        ]
