"""Point-to-point messages of `torch.distributed`: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lit_parallel.schedules.pipeline import pipelined_for
from lit_parallel.schedules.schedule import Schedule
from lit_parallel.transports.transport import Traffic, Transport, TransportError

# What planning assumes of a step's latency (seconds) and of a link (bytes per second). Only the number of blocks of
# a large tensor depends on them, and all ranks must agree on it: so they are constants, not measurements.
_PLANNED_LATENCY = 1e-3
_PLANNED_BANDWIDTH = 1e9


@dataclass(frozen=True, slots=True)
class _Message:
    """One message as its sender or its receiver sees it. `staging` is where a message to be added waits, or None."""

    peer: int
    start: int
    stop: int
    outgoing: bool
    staging: int | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one rank does in each step of a schedule, and how many elements wait to be added at most."""

    steps: tuple[tuple[_Message, ...], ...]
    staging_length: int


class ProcessGroupTransport(Transport):
    """Moves chunks between processes; a process holds one rank.

    All messages of a step, in both directions, are in flight at once. The transport makes a process group of its own,
    so that it may be used from a worker thread while the main thread uses the default group. Making and closing it
    are collective: all ranks of the default group take part.

    Args:
        timeout: How long a message may take before `run` gives up.
        backend: The backend of the group; by default the default group's.
    """

    def __init__(self, timeout: timedelta | None = None, backend: str | None = None) -> None:
        group = dist.new_group(timeout=timeout, backend=backend)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._group: dist.ProcessGroup | None = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.traffic = [Traffic()]
        self._plans: dict[tuple[Schedule, int, int], _Plan] = {}
        self._staging: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(self, schedule: Schedule, *tensors: Tensor, scale: float = 1) -> None:
        """Runs a schedule on this rank's tensor; see `Transport.run`.

        Large tensors are pipelined where the schedule's cost says that it pays. Messages to be added wait in staging
        memory that is allocated once and is as large as what arrives in one step.
        """
        self._check(schedule, tensors)
        if self._group is None:
            raise TransportError(f"Rank {self.rank}: the transport is closed.")
        (tensor,) = tensors
        if scale != 1:
            tensor.mul_(scale)
        plan = self._plan(schedule, tensor.numel(), tensor.element_size())
        staging = self._staging_for(tensor, plan.staging_length)
        for number, step in enumerate(plan.steps):
            views = [_view(message, tensor, staging) for message in step]
            self._exchange(self._group, step, views, f"step {number} of {schedule.name}")
            for message, view in zip(step, views, strict=True):
                if message.staging is not None:
                    tensor[message.start : message.stop].add_(view)

    def close(self) -> None:
        """Destroys the group; peers that still wait for this rank get a `TransportError`."""
        group, self._group = self._group, None
        self._plans.clear()
        self._staging.clear()
        # The default group's end takes all others with it.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _exchange(self, group: dist.ProcessGroup, step: tuple[_Message, ...], views: list[Tensor], where: str) -> None:
        """Sends and receives all messages of one step and waits for them."""
        traffic = self.traffic[0]
        operations = []
        for message, view in zip(step, views, strict=True):
            operations.append(dist.P2POp(dist.isend if message.outgoing else dist.irecv, view, message.peer, group))
            size = view.numel() * view.element_size()
            if message.outgoing:
                traffic.messages_sent += 1
                traffic.bytes_sent += size
            else:
                traffic.messages_received += 1
                traffic.bytes_received += size
        peers = sorted({message.peer for message in step})
        try:
            works = dist.batch_isend_irecv(operations)
            for index, work in enumerate(works):
                if len(works) == len(step):  # NCCL gives one handle for all of them.
                    peers = [step[index].peer]
                work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"Rank {self.rank} lost contact with rank {' or '.join(map(str, peers))} in {where}: that process has"
                f" ended, failed or is unreachable; its own error message says why. ({error})"
            ) from error

    def _plan(self, schedule: Schedule, num_elements: int, element_size: int) -> _Plan:
        key = (schedule, num_elements, element_size)
        if key not in self._plans:
            num_bytes = num_elements * element_size
            blocks = pipelined_for(schedule, num_bytes, _PLANNED_LATENCY, _PLANNED_BANDWIDTH)
            self._plans[key] = _make_plan(blocks, num_elements, self.rank)
        return self._plans[key]

    def _staging_for(self, tensor: Tensor, length: int) -> Tensor:
        key = (tensor.dtype, tensor.device)
        if key not in self._staging or self._staging[key].numel() < length:
            self._staging[key] = tensor.new_empty(length)
        return self._staging[key]


def _make_plan(schedule: Schedule, num_elements: int, rank: int) -> _Plan:
    steps: list[tuple[_Message, ...]] = []
    staging_length = 0
    for step in schedule.steps_of(rank):
        messages: list[_Message] = []
        used = 0
        for send in step:
            start, stop = schedule.bounds(send, num_elements)
            if start == stop:
                continue
            outgoing = send.src == rank
            staged = send.reduce and not outgoing
            messages.append(
                _Message(send.dst if outgoing else send.src, start, stop, outgoing, used if staged else None)
            )
            used += (stop - start) * staged
        if messages:
            steps.append(tuple(messages))
        staging_length = max(staging_length, used)
    return _Plan(tuple(steps), staging_length)


def _view(message: _Message, tensor: Tensor, staging: Tensor) -> Tensor:
    """The memory that a message is sent from or received into."""
    if message.staging is None:
        return tensor[message.start : message.stop]
    return staging[message.staging : message.staging + message.stop - message.start]
