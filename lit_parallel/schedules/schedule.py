"""A synchronisation algorithm as data: which rank sends which chunk to whom, in which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Send:
    """One message of a schedule.

    Attributes:
        src: The rank that sends.
        dst: The rank that receives.
        chunk: The first chunk of the message.
        reduce: The receiver adds the message to its own chunks (True) or takes it in their place (False).
        num_chunks: How many consecutive chunks travel in this one message.
    """

    src: int
    dst: int
    chunk: int
    reduce: bool
    num_chunks: int = 1

    @property
    def chunks(self) -> range:
        """The chunks that this message carries."""
        return range(self.chunk, self.chunk + self.num_chunks)


#: Messages that may happen at the same time. A rank that receives several adds them in the order listed here,
#: so that the same schedule gives the same bits in every run.
Step = tuple[Send, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All steps of one algorithm for one world size.

    Attributes:
        name: The algorithm's name, for messages and pictures.
        world_size: Number of ranks, P.
        num_chunks: Into how many near-equal chunks the tensor is cut; see `bounds`.
        make_steps: Returns a new iterator over the steps. Steps are made lazily: a schedule for thousands of ranks
            costs no memory until it is walked.
    """

    name: str
    world_size: int
    num_chunks: int
    make_steps: Callable[[], Iterator[Step]]

    def steps(self) -> Iterator[Step]:
        """All steps, in order."""
        return self.make_steps()

    def steps_of(self, rank: int) -> Iterator[Step]:
        """The steps as one rank sees them: only the messages that it sends or receives, in the same order."""
        for step in self.make_steps():
            yield tuple(send for send in step if rank in (send.src, send.dst))

    def bounds(self, send: Send, num_elements: int) -> tuple[int, int]:
        """The half-open range of elements that a message carries out of a flat tensor of `num_elements`.

        Chunk c is elements c*n//C to (c+1)*n//C, so sizes differ by at most one and chunks may be empty.
        """
        start = send.chunk * num_elements // self.num_chunks
        stop = (send.chunk + send.num_chunks) * num_elements // self.num_chunks
        return start, stop


def largest_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number` (at least 1)."""
    return 1 << (number.bit_length() - 1)
