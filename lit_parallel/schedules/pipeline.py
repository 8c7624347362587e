"""Software pipelining of any schedule: chunks are cut into blocks, which take their steps one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lit_parallel.schedules.cost import plan_seconds
from lit_parallel.schedules.schedule import Schedule, Send, Step

#: Block counts that `pipelined_for` weighs; more only add messages.
_BLOCK_COUNTS = (1, 2, 4, 8, 16)


def pipelined(schedule: Schedule, num_blocks: int) -> Schedule:
    """The same algorithm on blocks of each chunk: block k takes step s in step s+k.

    Algorithms that leave a direction of a link idle in each step (a tree: first up, then down) take up to half the
    time on large tensors; those that always use both (a ring) gain nothing. Every element meets the same additions
    in the same order as before, so the bits do not change.

    Cost: `num_blocks` - 1 more steps, `num_blocks` times the messages, the same bytes.
    """
    if num_blocks == 1:
        return schedule
    return Schedule(
        schedule.name,
        schedule.world_size,
        schedule.num_chunks * num_blocks,
        make_steps=lambda: _steps(schedule, num_blocks),
    )


def _steps(schedule: Schedule, num_blocks: int) -> Iterator[Step]:
    # The last `num_blocks` original steps, newest first: position k is where block k is now.
    window: deque[Step] = deque([()] * num_blocks, maxlen=num_blocks)
    for step in [*schedule.steps(), *[()] * (num_blocks - 1)]:
        window.appendleft(step)
        yield tuple(
            Send(send.src, send.dst, chunk * num_blocks + block, send.reduce)
            for block, earlier in enumerate(window)
            for send in earlier
            for chunk in send.chunks
        )


def pipelined_for(schedule: Schedule, num_bytes: int, latency: float, bandwidth: float) -> Schedule:
    """The schedule, pipelined into the number of blocks that is planned to be quickest.

    Args:
        schedule: Any schedule.
        num_bytes: Size of the tensor in bytes.
        latency: Seconds that a step costs whatever its size.
        bandwidth: Bytes per second that a rank can send, and at the same time receive.
    """
    candidates = (pipelined(schedule, count) for count in _BLOCK_COUNTS)
    return min(candidates, key=lambda candidate: plan_seconds(candidate, num_bytes, latency, bandwidth))
