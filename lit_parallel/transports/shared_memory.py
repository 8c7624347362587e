"""Ranks of one host that add straight from each other's memory."""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from lit_parallel.schedules.cost import Cost, cost
from lit_parallel.schedules.pipeline import pipelined
from lit_parallel.schedules.progress import Program, Read, plan_programs
from lit_parallel.schedules.schedule import Schedule
from lit_parallel.transports.links import Links, agree
from lit_parallel.transports.transport import Traffic, Transport, TransportError

_Array: TypeAlias = "Tensor | np.ndarray[Any, Any]"

#: A block is summed and handed on while it is in a core's cache.
_BLOCK_BYTES = 2 << 20
#: Elements that are added and then scaled at a time.
_PIECE = 1 << 15
_FULL_PRECISION_BYTES = 4
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (torch puts its segments there, without a name)


#: Length of a storage in bytes, and where in it the tensor starts.
_HEADER = struct.Struct("!QQ")
_MESSAGE_BYTES = 1024


class NoRoomError(RuntimeError):
    """There is not enough shared memory."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What this rank does in a run of a schedule on one tensor.

    Attributes:
        storage: The tensor's; the weak reference also keeps its number from being used for another storage.
        program: From the schedule.
        bounds: Elements of each read.
        sources: The peer's memory of each read.
        num_signals: How many signals each peer sends in a run.
        cost: Of the run.
    """

    storage: StorageWeakRef
    program: Program
    bounds: tuple[tuple[int, int], ...]
    sources: tuple[_Array, ...]
    num_signals: tuple[int, ...]
    cost: Cost


class SharedMemoryTransport(Transport):
    """Moves chunks by reading the peers' memory; a process holds one rank, all on one host, on Linux.

    The first time a tensor is seen, its storage is moved into a shared segment in place, so that all its views follow,
    and the peers map it. From then on nothing is copied but what the schedule says: a message that is added is one
    pass over memory. Segments have no name, so nothing is left behind however a process ends.

    Args:
        capacity: Bytes of tensors that each rank will share, checked against the room for shared memory.
        timeout: How long a wait may last.

    Raises:
        OtherHostError: The ranks are not on one host. Raised on all ranks alike, as the next one.
        NoRoomError: Shared memory has no room for `capacity` bytes of each rank.
    """

    def __init__(self, capacity: int = 0, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._links: Links | None = Links(timeout)
        self.rank, self.world_size = self._links.rank, self._links.world_size
        self.traffic = [Traffic()]
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._earlier = [0] * self.world_size  # signals of each peer in earlier runs
        self._running = threading.Lock()
        try:
            agree(_lack_of_room(capacity * self.world_size), NoRoomError)
        except NoRoomError:
            self.close()
            raise

    def run(self, schedule: Schedule, *tensors: Tensor, scale: float = 1) -> None:
        """Runs a schedule on this rank's tensor; see `Transport.run`.

        Whatever else shared the tensor's memory before its first run (a numpy array, say) does so no longer.
        """
        self._check(schedule, tensors)
        (tensor,) = tensors
        with self._running:
            links = self._open_links()
            if tensor.numel() and self.world_size > 1:
                with np.errstate(all="ignore"):  # infinite gradients are no news: mixed precision provokes them
                    self._run(links, self._plan(links, schedule, tensor), tensor, scale)

    def share(self, tensor: Tensor) -> dict[int, Tensor]:
        """Moves a 1-D tensor into shared memory in place; all ranks call it with tensors of one shape.

        Returns:
            The other ranks' tensors, each in its own memory.

        Raises:
            NoRoomError: A rank has no room for it.
            TransportError: A peer has ended, or the transport is closed.
        """
        with self._running:
            return self._share(self._open_links(), tensor)

    def barrier(self) -> None:
        """Blocks until all ranks have called it; what they wrote to shared memory before is seen after it.

        Raises:
            TransportError: A peer has ended, or the transport is closed.
        """
        with self._running:
            links = self._open_links()
            for peer in links.peers:
                links.signal(peer)
            for peer in links.peers:
                self._earlier[peer] += 1
                links.wait(peer, self._earlier[peer])

    def close(self) -> None:
        """Hangs up and unmaps; a run in another thread ends with a `TransportError` first."""
        if self._links is not None:
            self._links.hang_up()
        with self._running:
            if self._links is not None:
                self._links.close()
            self._links = None
            self._plans.clear()

    def _open_links(self) -> Links:
        if self._links is None:
            raise TransportError(f"Rank {self.rank}: the transport is closed.")
        return self._links

    def _run(self, links: Links, plan: _Plan, tensor: Tensor, scale: float) -> None:
        if tensor.itemsize < _FULL_PRECISION_BYTES:
            # Sums of half precision could overflow before they are scaled.
            tensor.mul_(scale)
            scale = 1
        for peer in plan.program.start_signals:
            links.signal(peer)
        array = _array(tensor)
        for read, source, (start, stop) in zip(plan.program.reads, plan.sources, plan.bounds, strict=True):
            for peer, count in read.waits:
                links.wait(peer, self._earlier[peer] + count)
            _carry_out(read, source, array[start:stop], scale)
            for peer in read.signals:
                links.signal(peer)
        for peer, count in plan.program.end_waits:
            links.wait(peer, self._earlier[peer] + count)
        self._earlier = [each + new for each, new in zip(self._earlier, plan.num_signals, strict=True)]

        traffic = self.traffic[0]
        traffic.messages_sent += plan.cost.messages_sent[self.rank]
        traffic.messages_received += plan.cost.messages_received[self.rank]
        traffic.bytes_sent += plan.cost.bytes_sent[self.rank]
        traffic.bytes_received += plan.cost.bytes_received[self.rank]

    def _plan(self, links: Links, schedule: Schedule, tensor: Tensor) -> _Plan:
        key = (tensor.untyped_storage()._cdata, schedule, tensor.storage_offset(), tensor.numel(), tensor.dtype)
        if key not in self._plans:
            # DDP makes new buckets after the first step: the peers' side of freed ones is unmapped.
            self._plans = {each: plan for each, plan in self._plans.items() if not plan.storage.expired()}  # type: ignore[no-untyped-call]
            self._plans[key] = self._make_plan(schedule, tensor, self._share(links, tensor))
        return self._plans[key]

    def _share(self, links: Links, tensor: Tensor) -> dict[int, Tensor]:
        """Moves a tensor's storage into shared memory and maps the peers'; all ranks do this in the same run."""
        storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        problem = "" if storage.is_shared() else _lack_of_room(storage.nbytes() * self.world_size)
        descriptors = [] if problem else [storage._share_fd_cpu_()[0]]
        for peer in links.peers:
            links.send(peer, _HEADER.pack(storage.nbytes(), first) if not problem else problem.encode(), descriptors)
        tensors = {}
        for peer in links.peers:
            message, theirs = links.receive(peer, _MESSAGE_BYTES)
            if not theirs:
                problem = problem or f"rank {peer}: {message.decode()}"
                continue
            num_bytes, first = _HEADER.unpack(message)
            mapped: UntypedStorage = UntypedStorage._new_shared_fd_cpu(theirs[0], num_bytes)  # type: ignore[attr-defined]
            os.close(theirs[0])
            offset = first // tensor.element_size()
            tensors[peer] = torch.empty(0, dtype=tensor.dtype).set_(mapped, offset, tensor.shape, (1,))
        if problem:
            raise NoRoomError(f"Rank {self.rank}: {problem}.")
        return tensors

    def _make_plan(self, schedule: Schedule, tensor: Tensor, peers: dict[int, Tensor]) -> _Plan:
        length, element_size = tensor.numel(), tensor.element_size()
        chunk_bytes = -(-length // schedule.num_chunks) * element_size
        blocks = pipelined(schedule, max(1, -(-chunk_bytes // _BLOCK_BYTES)))
        programs = plan_programs(blocks, length)
        program = programs[self.rank]
        bounds = tuple(blocks.bounds(read.send, length) for read in program.reads)
        arrays = {peer: _array(theirs) for peer, theirs in peers.items()}
        return _Plan(
            StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
            program,
            bounds,
            tuple(arrays[read.send.src][slice(*each)] for read, each in zip(program.reads, bounds, strict=True)),
            tuple(each.signals_to(self.rank) for each in programs),
            cost(schedule, length, element_size),
        )


def _carry_out(read: Read, source: _Array, target: _Array, scale: float) -> None:
    """Adds or copies one block."""
    if not read.send.reduce:
        target[:] = source  # type: ignore[assignment]
    elif scale == 1 or not read.completes:
        target += source
    else:
        # Scaled while it is in the innermost caches: no pass over memory of its own.
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            piece += source[start : start + _PIECE]
            piece *= scale


def _array(tensor: Tensor) -> _Array:
    """The tensor as what calculates quickest, on the same memory.

    NumPy takes a tenth of torch's time to cut out a block, but knows no bfloat16 and is slow at float16.
    """
    return tensor.numpy() if tensor.itemsize >= _FULL_PRECISION_BYTES else tensor


def _lack_of_room(num_bytes: int) -> str:
    """Why that much shared memory cannot be had, or ""."""
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return f"{_SHARED_MEMORY} is not writable"
    stats = os.statvfs(_SHARED_MEMORY)
    free = stats.f_bavail * stats.f_frsize
    return f"{_SHARED_MEMORY} has {free:,} bytes free, and {num_bytes:,} are needed" if free < num_bytes else ""
