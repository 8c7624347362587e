"""A process group that goes on without members that have ended, and takes in those that come back."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work
from torch.distributed import ProcessGroup

from lit_parallel.transports import TransportError

log = logging.getLogger(__name__)
#: The name to give to `torch.distributed.init_process_group`.
BACKEND = "lit_parallel_elastic"
_BEAT_SECONDS = 1.0
#: A member whose beats stay away for so long is taken for dead.
_SILENCE_SECONDS = 5.0
#: torch's store takes no more in one piece than 8 MiB.
_PIECE_BYTES = 4 << 20
#: Waits between looks at the store: short at first, for members that come at the same time.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.0005, 0.02
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda all_of: all_of.sum(0, dtype=all_of.dtype),
    "AVG": lambda all_of: all_of.sum(0, dtype=all_of.dtype) / len(all_of),
    "PRODUCT": lambda all_of: all_of.prod(0, dtype=all_of.dtype),
    "MIN": lambda all_of: all_of.amin(0),
    "MAX": lambda all_of: all_of.amax(0),
}


class _Done(Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class ElasticGroup(ProcessGroup):
    """Collectives among the members that live, through the store of the training's rendezvous.

    For the few small collectives of workers that push and pull: metrics, barriers, decisions to stop. In each one the
    first rank collects a message of every member, leaves out who is not heard for 5 seconds, and publishes the rest;
    so all agree on who took part. `size` and `rank` are those of the last collective: who takes a mean divides by the
    number of values that are in the sum. Only the first rank cannot be spared: it holds the store.

    A rank that is started again is alone at first: its collectives have itself as only member, until it calls `join`,
    gets what the others have to tell it, and then `enter`.

    Args:
        store: That all ranks reach.
        rank: This rank.
        world_size: How many there are at first.
        timeout: How long a member that lives may take to come to a collective.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._store, self._rank, self._timeout = store, rank, timeout.total_seconds()
        #: How often this rank was started.
        self.life: int = store.add(f"lives/{rank}", 1)
        #: Whether this rank has come back, and is not in yet.
        self.is_alone = self.life > 1
        self._members = [rank] if self.is_alone else list(range(world_size))
        self._lives = dict.fromkeys(range(world_size), 1)
        self._beats: dict[int, tuple[int, float]] = {}  # for each member the last beat, and when it was seen
        self._number, self._joined = 0, [rank]
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(store.clone(),), name="elastic-beat", daemon=True)
        self._heart.start()

    def size(self) -> int:
        """How many are in."""
        return len(self._members)

    def rank(self) -> int:
        """This rank's place among those who are in."""
        return self._members.index(self._rank)

    def getBackendName(self) -> str:  # noqa: N802
        """As torch calls it."""
        return BACKEND

    def admit(self, make_message: Callable[[], bytes]) -> None:
        """Takes in who waits to join; all members call it.

        Args:
            make_message: Called on the first rank if there is anybody: what they get to know.
        """
        joining: dict[int, int] = {}
        if self._rank == 0:
            for rank in set(self._lives).difference([0]):
                if self._store.check([f"join/{rank}"]):
                    joining[rank] = int(self._store.get(f"join/{rank}"))
                    self._store.delete_key(f"join/{rank}")
        known = json.loads(self._exchange(json.dumps(list(joining.items())).encode())[0])
        if not known:
            return
        for rank, life in known:
            self._lives[rank] = life
            self._beats.pop(rank, None)
        self._members = sorted({*self._members, *(rank for rank, _ in known)})
        if self._rank == 0:
            message = json.dumps([self._number, self._members]).encode() + b"\n" + make_message()
            for rank, life in known:
                self._put(f"welcome/{rank}.{life}", message)
                log.warning("Rank %d is back.", rank)

    def join(self) -> bytes:
        """Blocks until the others let this rank in, and returns what they have to tell it.

        Raises:
            TransportError: The training has ended.
        """
        self._store.set(f"join/{self._rank}", str(self.life))
        key = f"welcome/{self._me}"
        head, message = self._wait_for(key).split(b"\n", 1)
        self._delete(key)
        self._number, self._joined = json.loads(head)
        return message

    def enter(self) -> None:
        """From now on this rank's collectives are with the others, from that one on in which they let it in."""
        self._members, self.is_alone = self._joined, False

    def check(self) -> None:
        """Makes sure that this rank may go on.

        Raises:
            TransportError: The first rank has ended, or the others have gone on without this one.
        """
        try:
            is_out = self._store.check([f"out/{self._me}"])
        except dist.DistError as error:
            raise TransportError(
                f"Rank {self._rank} lost contact with rank 0: training there has ended or failed, and without it nobody"
                " can go on; its own error message says why."
            ) from error
        if is_out:
            raise TransportError(
                f"Rank {self._rank} was not heard for {_SILENCE_SECONDS:.0f} seconds, and the others went on without"
                " it. Start it again to take part."
            )

    def barrier(self, opts: Any = None) -> _Done:  # noqa: D102
        self._exchange(b"")
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Done:  # type: ignore[override]  # noqa: D102
        (tensor,) = tensors
        root = opts.rootRank
        messages = self._exchange(_to_bytes(tensor) if self.rank() == root else b"")
        _fill(tensor, messages[root])
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Done:  # type: ignore[override]  # noqa: D102
        (tensor,) = tensors
        operation = opts.reduceOp
        name = next((name for name in _REDUCTIONS if operation == getattr(dist.ReduceOp, name)), None)
        if name is None:
            raise NotImplementedError(f"{BACKEND} reduces by one of {', '.join(_REDUCTIONS)}.")
        gathered = [torch.empty_like(tensor) for _ in range(self.size())]
        self._gather(gathered, tensor)
        tensor.copy_(_REDUCTIONS[name](torch.stack(gathered[: self.size()])))
        return _Done()

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Done:  # type: ignore[override]  # noqa: D102
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]  # noqa: D102
        self._gather(outputs[0], inputs[0])
        return _Done()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Done:  # type: ignore[override]  # noqa: D102
        self._gather(outputs[0] if outputs else [], inputs[0])
        return _Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _Done:
        self._gather(list(torch.split(output.view(-1), tensor.numel())), tensor)
        return _Done()

    def shutdown(self) -> None:
        """Ends this rank's beats."""
        self._closed.set()
        self._heart.join()

    abort = shutdown

    @property
    def _me(self) -> str:
        return f"{self._rank}.{self.life}"

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fills the outputs with the members' tensors; where a member has ended meanwhile, the last ones are zeros."""
        messages = self._exchange(_to_bytes(tensor))
        for place, output in enumerate(outputs):
            if place < len(messages):
                _fill(output, messages[place])
            else:
                output.zero_()

    def _exchange(self, message: bytes) -> list[bytes]:
        """The messages of all members that live, in the order of their ranks."""
        if self.is_alone:
            return [message]
        self._number += 1
        if self._rank != 0:
            self._put(f"{self._number}/{self._me}", message)
            head, rest = self._wait_for(f"{self._number}/all").split(b"\n", 1)
            self._members, lengths = json.loads(head)
        else:
            messages = [message]
            for rank in self._members[1:]:
                theirs = self._take(rank)
                if theirs is not None:
                    messages.append(theirs)
            lengths, rest = [len(each) for each in messages], b"".join(messages)
            self._put(f"{self._number}/all", json.dumps([self._members, lengths]).encode() + b"\n" + rest)
            self._delete(f"{self._number - 1}/all")  # all have read it: they are in the next one
        ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
        return [rest[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _take(self, rank: int) -> bytes | None:
        """On the first rank: a member's message, or None if it is out from now on."""
        key, start = f"{self._number}/{rank}.{self._lives[rank]}", time.monotonic()
        for _ in _looks():
            if self._store.check([key]):
                message = self._get(key)
                self._delete(key)
                return message
            if self._store.check([f"join/{rank}"]):
                reason = "was started again"
            elif (silence := self._silence_of(rank)) > _SILENCE_SECONDS:
                reason = f"has not been heard for {silence:.0f} seconds"
            elif time.monotonic() - start > self._timeout:
                raise TransportError(f"Rank {rank} has not come to a collective for {self._timeout:.0f} seconds.")
            else:
                continue
            log.warning("Rank %d %s; the others go on without it.", rank, reason)
            self._store.set(f"out/{rank}.{self._lives[rank]}", "")
            self._members = [each for each in self._members if each != rank]
            return None
        raise AssertionError("unreachable")

    def _silence_of(self, rank: int) -> float:
        """Seconds since a member was heard."""
        now, key = time.monotonic(), f"beat/{rank}.{self._lives[rank]}"
        beat = self._store.add(key, 0)
        last, seen = self._beats.get(rank, (-1, now))
        self._beats[rank] = (beat, now) if beat != last else (last, seen)
        return now - self._beats[rank][1]

    def _wait_for(self, key: str) -> bytes:
        """On other ranks: what the first rank publishes."""
        for _ in _looks():
            self.check()
            if self._store.check([key]):
                return self._get(key)
        raise AssertionError("unreachable")

    def _put(self, key: str, message: bytes) -> None:
        """Publishes a message; its first piece, with the number of all, comes last."""
        pieces = [message[start : start + _PIECE_BYTES] for start in range(0, len(message), _PIECE_BYTES)] or [b""]
        for number, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]
        self._store.set(key, b"%d\n" % len(pieces) + pieces[0])  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes:
        count, first = self._store.get(key).split(b"\n", 1)
        return b"".join([first, *(self._store.get(f"{key}/{number}") for number in range(1, int(count)))])

    def _delete(self, key: str) -> None:
        if self._store.check([key]):
            for number in range(1, int(self._store.get(key).split(b"\n", 1)[0])):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)

    def _beat(self, store: Store) -> None:
        try:
            while True:
                store.add(f"beat/{self._me}", 1)
                if self._closed.wait(_BEAT_SECONDS):
                    return
        except dist.DistError:
            return  # the first rank has ended, and with it the store; the main thread says so


def _looks() -> Any:
    """Waits a little longer each time."""
    seconds = _FIRST_LOOK_SECONDS
    while True:
        yield
        time.sleep(seconds)
        seconds = min(1.2 * seconds, _LOOK_SECONDS)


def _to_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _fill(tensor: Tensor, message: bytes) -> None:
    if message:
        tensor.copy_(torch.frombuffer(bytearray(message), dtype=tensor.dtype).view(tensor.shape))


def _make(store: Store, rank: int, world_size: int, timeout: timedelta) -> ElasticGroup:
    return ElasticGroup(store, rank, world_size, timeout)


def register_backend() -> None:
    """Makes `BACKEND` known to torch."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])


def elastic_group() -> ElasticGroup | None:
    """The process's default group, if it is elastic."""
    group = dist.distributed_c10d._get_default_group()
    return group if isinstance(group, ElasticGroup) else None
