"""What a schedule costs: messages, bytes and steps, and the time that a simple model of a network gives them."""

from __future__ import annotations

from dataclasses import dataclass

from lit_parallel.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Cost:
    """The messages and bytes of one run of a schedule. Messages without an element are not sent and not counted.

    Attributes:
        num_steps: Steps in which at least one message is sent.
        messages_sent: Messages that each rank sends, by rank.
        messages_received: Messages that each rank receives, by rank.
        bytes_sent: Bytes that each rank sends, by rank.
        bytes_received: Bytes that each rank receives, by rank.
        critical_bytes: The bytes of the busiest rank's busier direction in each step, added over the steps.
    """

    num_steps: int
    messages_sent: tuple[int, ...]
    messages_received: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    critical_bytes: int

    @property
    def busiest_messages(self) -> int:
        """Messages sent plus received at the rank that handles most."""
        return max(sent + received for sent, received in zip(self.messages_sent, self.messages_received, strict=True))

    @property
    def busiest_bytes(self) -> int:
        """Bytes sent plus received at the rank that handles most."""
        return max(sent + received for sent, received in zip(self.bytes_sent, self.bytes_received, strict=True))


def cost(schedule: Schedule, num_elements: int, element_size: int = 1) -> Cost:
    """Counts what one run of the schedule moves.

    Args:
        schedule: Any schedule.
        num_elements: Length of the flat tensor.
        element_size: Bytes of one element.
    """
    ranks = range(schedule.world_size)
    messages_sent, messages_received, bytes_sent, bytes_received = ([0 for _ in ranks] for _ in range(4))
    num_steps = critical_bytes = 0
    for step in schedule.steps():
        sent_now, received_now = [0 for _ in ranks], [0 for _ in ranks]
        for send in step:
            start, stop = schedule.bounds(send, num_elements)
            size = (stop - start) * element_size
            if size:
                messages_sent[send.src] += 1
                messages_received[send.dst] += 1
                sent_now[send.src] += size
                received_now[send.dst] += size
        busiest = max(*sent_now, *received_now)
        num_steps += busiest > 0
        critical_bytes += busiest
        for rank in ranks:
            bytes_sent[rank] += sent_now[rank]
            bytes_received[rank] += received_now[rank]
    return Cost(
        num_steps,
        tuple(messages_sent),
        tuple(messages_received),
        tuple(bytes_sent),
        tuple(bytes_received),
        critical_bytes,
    )


def plan_seconds(schedule: Schedule, num_bytes: int, latency: float, bandwidth: float) -> float:
    """The time of one run in the alpha-beta model (Thakur et al. 2005), each rank sending and receiving at once.

    Args:
        schedule: Any schedule.
        num_bytes: Size of the tensor in bytes.
        latency: Seconds per step (alpha).
        bandwidth: Bytes per second in each direction of a rank (1/beta).
    """
    total = cost(schedule, num_bytes)
    return total.num_steps * latency + total.critical_bytes / bandwidth
