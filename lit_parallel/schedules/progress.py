"""What each rank must wait for when ranks read each other's memory, derived from the schedule.

With messages, a receiver has a copy of what it was sent. Without copies it reads the sender's own memory, at its own
pace. Two things can then go wrong, and a wait is derived for each: what is read may not be final yet, and what is
overwritten may still be read by another rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lit_parallel.schedules.schedule import Schedule, Send

#: The position before a rank's first read: it has entered the run, so its tensor holds its input.
START = -1


@dataclass(frozen=True, slots=True)
class Read:
    """One message as its receiver carries it out: it reads the sender's chunks and adds or copies them to its own.

    Attributes:
        send: The message.
        waits: For each peer, how many of its signals must have come before.
        signals: The peers to signal afterwards.
        completes: With this addition the receiver's chunk holds the sum of all ranks.
    """

    send: Send
    waits: tuple[tuple[int, int], ...]
    signals: tuple[int, ...]
    completes: bool


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does in a run, in order.

    Attributes:
        start_signals: The peers to signal when the rank enters the run.
        reads: Its reads.
        end_waits: For each peer, how many of its signals must have come before the run is over: until then the peer
            may read this rank's memory.
    """

    start_signals: tuple[int, ...]
    reads: tuple[Read, ...]
    end_waits: tuple[tuple[int, int], ...]

    def signals_to(self, peer: int) -> int:
        """How many signals the rank sends to a peer in a run."""
        return (peer in self.start_signals) + sum(peer in read.signals for read in self.reads)


def plan_programs(schedule: Schedule, num_elements: int) -> list[Program]:
    """Derives every rank's program; messages without an element are left out.

    Each signal of rank r to rank p means "the next of those reads of mine that you wait for is done", so a rank only
    counts the signals of each peer.
    """
    ranks = range(schedule.world_size)
    sends: list[list[Send]] = [[] for _ in ranks]  # by receiver
    needs: list[list[dict[int, int]]] = [[] for _ in ranks]  # for each read: peer -> position it must have passed
    completes: list[list[bool]] = [[] for _ in ranks]
    # Bit r says that rank r's value is in there, as in `verify`.
    held = [[1 << rank] * schedule.num_chunks for rank in ranks]
    everyone = (1 << schedule.world_size) - 1
    last_write: dict[tuple[int, int], int] = {}
    readers: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # since the last write
    last_read_of: list[dict[int, int]] = [{} for _ in ranks]

    for step in schedule.steps():
        # Chunk by chunk: the chunks of one message may have been written at different times.
        singles = [Send(send.src, send.dst, chunk, send.reduce) for send in step for chunk in send.chunks]
        step_sends = [send for send in singles if range(*schedule.bounds(send, num_elements))]
        reads_now: list[tuple[tuple[int, int], int, int]] = []  # place, reader, position
        for send in step_sends:
            source, target = (send.src, send.chunk), (send.dst, send.chunk)
            position = len(sends[send.dst])
            # What is read must be final: after the sender's last write to it, or after the sender's start.
            need = {send.src: last_write.get(source, START)}
            # What is written must not be read any more.
            for reader, last in readers[target].items():
                need[reader] = max(need.get(reader, START), last)
            sends[send.dst].append(send)
            needs[send.dst].append(need)
            incoming = held[send.src][send.chunk]
            held[send.dst][send.chunk] = incoming | (held[send.dst][send.chunk] if send.reduce else 0)
            completes[send.dst].append(send.reduce and held[send.dst][send.chunk] == everyone)
            reads_now.append((source, send.dst, position))
            # Within a step no message reads what another one writes (`verify` proves it), so the order of these
            # updates does not matter; several additions to one place are one rank's own, in order.
            last_write[target] = position
            readers[target] = {}
        for source, reader, position in reads_now:
            readers[source][reader] = last_read_of[source[0]][reader] = position

    # Which positions of rank r rank p ever waits for: only these are signalled.
    awaited: list[list[set[int]]] = [[set() for _ in ranks] for _ in ranks]
    for waiter in ranks:
        for need in (*needs[waiter], last_read_of[waiter]):
            for peer, position in need.items():
                awaited[peer][waiter].add(position)
    numbered = [[{position: n + 1 for n, position in enumerate(sorted(each))} for each in row] for row in awaited]

    programs = []
    for rank in ranks:
        seen: dict[int, int] = defaultdict(int)

        def waits(need: dict[int, int], rank: int = rank, seen: dict[int, int] = seen) -> tuple[tuple[int, int], ...]:
            counts = {peer: numbered[peer][rank][position] for peer, position in need.items() if peer != rank}
            new = tuple((peer, count) for peer, count in counts.items() if count > seen[peer])
            seen.update(new)
            return new

        def signals(position: int, rank: int = rank) -> tuple[int, ...]:
            return tuple(peer for peer in ranks if peer != rank and position in numbered[rank][peer])

        reads = tuple(
            Read(send, waits(need), signals(position), complete)
            for position, (send, need, complete) in enumerate(
                zip(sends[rank], needs[rank], completes[rank], strict=True)
            )
        )
        programs.append(Program(signals(START), reads, waits(last_read_of[rank])))
    return programs
