"""The proof of a schedule: it is run on sets of contributors instead of numbers."""

from __future__ import annotations

from collections.abc import Collection

from lit_parallel.schedules.schedule import Schedule, Send


class ScheduleError(ValueError):
    """A schedule does not compute the sum, or its result would depend on timing."""


def verify(schedule: Schedule, ranks: Collection[int] | None = None) -> None:
    """Proves that a schedule is an all-reduce: each contribution is counted exactly once in every chunk of every rank.

    Every chunk holds the set of ranks whose values have been added into it. A message that is added must bring only
    new contributors; at the end each set must be complete. Within a step no message may read a chunk that another
    one writes, and a chunk that is replaced may be written only once: else the result would depend on timing.

    Args:
        schedule: Any schedule.
        ranks: The ranks that must end with the whole sum; by default all of them.

    Raises:
        ScheduleError: What is wrong, with the step and the message.
    """
    world_size, num_chunks = schedule.world_size, schedule.num_chunks
    if world_size < 1 or num_chunks < 1:
        raise ScheduleError(
            f"{schedule.name}: world_size and num_chunks must be at least 1, not {world_size} and {num_chunks}."
        )
    # Bit r of held[rank][chunk] says that rank r's value is in there.
    held = [[1 << rank] * num_chunks for rank in range(world_size)]

    for number, step in enumerate(schedule.steps()):
        where = f"{schedule.name} with {world_size} ranks, step {number}"
        reads: set[tuple[int, int]] = set()
        adds: set[tuple[int, int]] = set()
        copies: set[tuple[int, int]] = set()
        for send in step:
            _check_range(send, world_size, num_chunks, where)
            for chunk in send.chunks:
                reads.add((send.src, chunk))
                target = (send.dst, chunk)
                if target in copies or (target in adds and not send.reduce):
                    raise ScheduleError(f"{where}: chunk {chunk} of rank {send.dst} is replaced and written again.")
                (adds if send.reduce else copies).add(target)
        for rank, chunk in sorted(reads & (adds | copies)):
            raise ScheduleError(f"{where}: chunk {chunk} of rank {rank} is read while it is written.")

        for send in step:
            for chunk in send.chunks:
                incoming = held[send.src][chunk]
                if send.reduce and held[send.dst][chunk] & incoming:
                    raise ScheduleError(f"{where}: {send} counts a contribution twice.")
                held[send.dst][chunk] = (held[send.dst][chunk] | incoming) if send.reduce else incoming

    everyone = (1 << world_size) - 1
    for rank in range(world_size) if ranks is None else ranks:
        for chunk in range(num_chunks):
            missing = [other for other in range(world_size) if not held[rank][chunk] >> other & 1]
            if held[rank][chunk] != everyone:
                raise ScheduleError(
                    f"{schedule.name} with {world_size} ranks: chunk {chunk} of rank {rank} ends without the"
                    f" contributions of ranks {missing}."
                )


def _check_range(send: Send, world_size: int, num_chunks: int, where: str) -> None:
    valid_ranks = 0 <= send.src < world_size and 0 <= send.dst < world_size and send.src != send.dst
    valid_chunks = send.num_chunks >= 1 and 0 <= send.chunk <= num_chunks - send.num_chunks
    if not (valid_ranks and valid_chunks):
        raise ScheduleError(
            f"{where}: {send} is out of range; ranks go from 0 to {world_size - 1} and differ, chunks from 0 to"
            f" {num_chunks - 1}."
        )
