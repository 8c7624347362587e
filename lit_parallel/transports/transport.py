"""The interface between schedules and the ways in which bytes move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lit_parallel.schedules.schedule import Schedule


class TransportError(RuntimeError):
    """A peer could not be reached or has failed. The transport cannot be used any more."""


@dataclass(slots=True)
class Traffic:
    """What one rank has moved since the transport was made; `cost` predicts it exactly."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Transport(ABC):
    """Runs schedules on tensors.

    A process holds one rank of a distributed transport and all ranks of an in-memory one; `run` takes one tensor for
    each rank that the process holds, in rank order.

    The contract, which `lit_parallel.testing.check_transport` checks:

    - `run` works in place and blocks until the tensors hold the result (on CUDA: until the work is queued on the
      current stream). All tensors are flat, of one length and dtype. A length of zero, or one less than the number of
      chunks, is valid: messages without an element are not sent.
    - All ranks call `run` with equal schedules and lengths in the same order.
    - Messages that a rank adds in one step are added in the order in which the step lists them, so the same input
      gives the same bits in every run.
    - `run` raises `TransportError`, naming the peer where it is known, when a peer has ended or closed its transport.
    - `close` may be called more than once, and ends waiting peers with a `TransportError`.
    - `traffic` counts, per rank that the process holds, the messages and bytes that were moved.
    """

    world_size: int
    traffic: list[Traffic]

    @abstractmethod
    def run(self, schedule: Schedule, *tensors: Tensor, scale: float = 1) -> None:
        """Runs a schedule in place.

        Args:
            schedule: A schedule for this transport's world size.
            tensors: One flat tensor for each rank that this process holds.
            scale: What the sum is multiplied by: 1/P makes an all-reduce a mean. Inputs of half precision are scaled
                before they are added, so that sums do not overflow.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections and memory."""

    def _check(self, schedule: Schedule, tensors: tuple[Tensor, ...]) -> None:
        if schedule.world_size != self.world_size:
            raise ValueError(
                f"The schedule {schedule.name!r} is for {schedule.world_size} ranks, the transport has"
                f" {self.world_size}."
            )
        if len(tensors) != len(self.traffic):
            raise ValueError(
                f"Give one tensor for each of this process's {len(self.traffic)} ranks, not {len(tensors)}."
            )
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) != 1 or tensors[0].dim() != 1:
            shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
            raise ValueError(f"All tensors must be flat and of one length and dtype; got {shapes}.")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("Tensors must be contiguous: they are changed in place.")
