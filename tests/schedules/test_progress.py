"""The derived waits, by brute force: every interleaving of the ranks' reads is tried."""

from __future__ import annotations

import dataclasses

import pytest

from lit_parallel.schedules import Schedule, available_algorithms, get_algorithm, pipelined
from lit_parallel.schedules.progress import Program, plan_programs


class RaceError(AssertionError):
    pass


def explore(schedule: Schedule, programs: list[Program], num_elements: int) -> int:
    """Walks all states that the ranks can reach and returns how many there are.

    Each rank's place is (position, reading): a read begins and ends as two events, so that reads overlap in every way.
    A state also holds which contributions each chunk of each rank has: they follow from the positions alone unless
    there is a race, which is what is to be found.
    """
    world_size, everyone = schedule.world_size, (1 << schedule.world_size) - 1
    start_values = tuple(tuple((1 << rank) for _ in range(schedule.num_chunks)) for rank in range(world_size))
    # Position -1: not entered; n: in the run with n reads done; len + 1: returned.
    start = (tuple((-1, False) for _ in range(world_size)), start_values)
    seen, stack = {start}, [start]
    finished = 0

    def signals(src: int, dst: int, position: int) -> int:
        program = programs[src]
        return (position >= 0 and dst in program.start_signals) + sum(
            dst in read.signals for read in program.reads[: max(0, position)]
        )

    while stack:
        state = stack.pop()
        places, values = state
        following = []
        for rank, (position, reading) in enumerate(places):
            program = programs[rank]
            if position == -1:
                following.append(move(places, rank, (0, False), values))
            elif position < len(program.reads):
                read = program.reads[position]
                send = read.send
                if not reading:
                    if all(signals(peer, rank, places[peer][0]) >= count for peer, count in read.waits):
                        following.append(move(places, rank, (position, True), values))
                else:
                    row = list(values[rank])
                    incoming = values[send.src][send.chunk]
                    if send.reduce and row[send.chunk] & incoming:
                        raise RaceError(f"{send} adds twice")
                    row[send.chunk] = row[send.chunk] | incoming if send.reduce else incoming
                    changed = (*values[:rank], tuple(row), *values[rank + 1 :])
                    following.append(move(places, rank, (position + 1, False), changed))
            elif position == len(program.reads) and all(
                signals(peer, rank, places[peer][0]) >= count for peer, count in program.end_waits
            ):
                if any(value != everyone for value in values[rank]):
                    raise RaceError(f"rank {rank} returns without the sum")
                following.append(move(places, rank, (position + 1, False), values))
        check_overlaps(programs, places)
        if not following:
            if any(position != len(program.reads) + 1 for (position, _), program in zip(places, programs, strict=True)):
                raise RaceError(f"deadlock at {places}")
            finished += 1
        for each in following:
            if each not in seen:
                seen.add(each)
                stack.append(each)
    assert finished == 1, "the result depends on timing"
    return len(seen)


def move(places, rank, place, values):
    return (*places[:rank], place, *places[rank + 1 :]), values


def check_overlaps(programs, places):
    """Nobody reads what is being written, or the memory of a rank that has not entered or has already returned."""
    active = [(rank, programs[rank].reads[position].send) for rank, (position, reading) in enumerate(places) if reading]
    for rank, send in active:
        if places[send.src][0] == -1 or places[send.src][0] > len(programs[send.src].reads):
            raise RaceError(f"{send} reads outside of rank {send.src}'s run")
        for other, its in active:
            if other != rank and (its.src, its.chunk) == (rank, send.chunk):
                raise RaceError(f"{its} reads while {send} writes")


CASES = [
    (name, world_size, blocks)
    for name in available_algorithms()
    for world_size, blocks in ((1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1))
]


@pytest.mark.parametrize(("name", "world_size", "blocks"), CASES)
def test_no_interleaving_races_or_deadlocks(name, world_size, blocks):
    schedule = pipelined(get_algorithm(name).make_schedule(world_size), blocks)
    length = schedule.num_chunks
    assert explore(schedule, plan_programs(schedule, length), length) >= 1


@pytest.mark.parametrize("name", [name for name in available_algorithms() if name != "allreduce"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_wait_is_needed(name, world_size):
    """Without its start waits, its other waits or its end waits, each algorithm races: the search can fail."""
    schedule = get_algorithm(name).make_schedule(world_size)
    length = schedule.num_chunks
    programs = plan_programs(schedule, length)

    def without_waits(program: Program) -> Program:
        return dataclasses.replace(program, reads=tuple(dataclasses.replace(read, waits=()) for read in program.reads))

    def without_end(program: Program) -> Program:
        return dataclasses.replace(program, end_waits=())

    for change in (without_waits, without_end):
        with pytest.raises(AssertionError):
            explore(schedule, [change(program) for program in programs], length)


def test_empty_messages_are_left_out():
    programs = plan_programs(get_algorithm("ring").make_schedule(4), 1)
    assert sum(len(program.reads) for program in programs) == 2 * 3
    assert all(not program.reads for program in plan_programs(get_algorithm("ring").make_schedule(4), 0))


@pytest.mark.parametrize("name", available_algorithms())
def test_sums_are_scaled_exactly_once(name):
    """Followed on numbers: each chunk that a rank returns was multiplied once, when its sum was complete."""
    for world_size in range(2, 10):
        schedule = get_algorithm(name).make_schedule(world_size)
        programs = plan_programs(schedule, schedule.num_chunks)
        reads = {rank: iter(program.reads) for rank, program in enumerate(programs)}
        values = [[float(1 << rank)] * schedule.num_chunks for rank in range(world_size)]
        for step in schedule.steps():
            for send in step:
                for chunk in send.chunks:
                    read = next(reads[send.dst])
                    assert (read.send.src, read.send.chunk) == (send.src, chunk)
                    source, target = values[send.src][chunk], values[send.dst][chunk]
                    values[send.dst][chunk] = (target + source if send.reduce else source) * (
                        0.5 if read.completes else 1
                    )
        assert values == [[(2**world_size - 1) / 2] * schedule.num_chunks] * world_size
