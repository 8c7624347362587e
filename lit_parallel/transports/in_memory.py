"""All ranks in one process, as tensors on one or many devices."""

from __future__ import annotations

from torch import Tensor

from lit_parallel.schedules.schedule import Schedule
from lit_parallel.transports.transport import Traffic, Transport


class InMemoryTransport(Transport):
    """Moves chunks between the tensors of one process.

    With the `central` schedule this is the tutorial's all-reduce over a list of gradients; the `dp` strategy adds its
    replicas' gradients with it, and it is the reference that other transports are compared with.

    Args:
        world_size: Number of ranks; `run` takes as many tensors, rank r's on any device.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.traffic = [Traffic() for _ in range(world_size)]

    def run(self, schedule: Schedule, *tensors: Tensor, scale: float = 1) -> None:
        """Runs a schedule over one tensor per rank; see `Transport.run`."""
        self._check(schedule, tensors)
        if scale != 1:
            for tensor in tensors:
                tensor.mul_(scale)
        for step in schedule.steps():
            # One message after the other gives the same result as all at once: within a step no message reads what
            # another one writes (`verify` proves it).
            for send in step:
                start, stop = schedule.bounds(send, tensors[0].numel())
                if start == stop:
                    continue
                source, target = tensors[send.src][start:stop], tensors[send.dst][start:stop]
                if send.reduce:
                    target.add_(source.to(target.device, non_blocking=True))
                else:
                    target.copy_(source, non_blocking=True)
                size = source.numel() * source.element_size()
                self.traffic[send.src].messages_sent += 1
                self.traffic[send.src].bytes_sent += size
                self.traffic[send.dst].messages_received += 1
                self.traffic[send.dst].bytes_received += size

    def close(self) -> None:
        """Nothing to release."""
