"""A worker's side: pushes gradients to all servers and pulls what is new."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import zmq
from torch import Tensor
from torch.optim import Optimizer

from lit_parallel.parameter_server.connection import Answer, Connection, RefusalError, connect
from lit_parallel.parameter_server.optimizer_state import State, cut_state, in_memory_order, merge_state
from lit_parallel.parameter_server.partition import Piece, plan_shards
from lit_parallel.parameter_server.segment import Segment
from lit_parallel.parameter_server.wire import CurveKeys, copy_into, encode, pack_state, unpack_state

log = logging.getLogger(__name__)
_BEAT_SECONDS = 1.0
#: Gradients that are sent together before backward is over.
_PART_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought.

    Attributes:
        version: Updates applied by the server that has applied most.
        versions: Updates applied by each server.
        staleness: Pushes that this worker was ahead of the slowest one.
        seconds: How long it waited.
    """

    version: int
    versions: tuple[int, ...]
    staleness: int
    seconds: float


class Client:
    """One worker's connections to all servers.

    Where server and worker are on one host, gradients and weights go through memory that both share, and only the
    messages about them through the connection.

    Args:
        addresses: Of the servers.
        worker: This worker's rank.
        weights: By name; the same names, shapes and layouts on all workers.
        keys: As the servers'.
        check_hope: Given it, this worker waits for a server that has ended to be started again from its snapshot, as
            long as this function, called each second, raises nothing; and servers go on without workers that end.
        life: How often this worker has been started.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        weights: Mapping[str, Tensor],
        keys: CurveKeys | None = None,
        *,
        check_hope: Callable[[], None] | None = None,
        life: int = 1,
    ) -> None:
        #: How often this worker has pushed.
        self.clock = 0
        self._known_clock = 0  # of the pushes that all servers have counted
        self._who = {"worker": worker, "life": life}
        self._survives = check_hope is not None
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        sizes = {name: (weight.numel(), weight.itemsize) for name, weight in self._weights.items()}
        self.shards = plan_shards(sizes, len(addresses))
        #: Gradients and weights that are in this memory need no copy; None where no server is on this host.
        self.segment: Segment | None = None
        self._inside = False
        self._parts: dict[str, tuple[Tensor, int]] = {}  # pushed in parts: the gradient, and its version then
        self._unsent: list[str] = []
        self._context = zmq.Context()
        self._connections = [
            Connection(connect(self._context, address, keys), address, pieces, self._introduce, check_hope)
            for address, pieces in zip(addresses, self.shards, strict=True)
        ]
        self._closed = threading.Event()
        beating = [connect(self._context, address, keys) for address in addresses]
        self._heart = threading.Thread(target=self._beat, args=(beating,), name="parameter-server-beat", daemon=True)
        self._heart.start()

    def init(
        self, num_workers: int, staleness: float, optimizer: Optimizer | None, names: Mapping[torch.nn.Parameter, str]
    ) -> None:
        """Gives the servers the weights; one worker calls it, before the others enter.

        Args:
            num_workers: How many will push.
            staleness: As in `Store`.
            optimizer: What updates the weights there; None if servers only average gradients.
            names: Of the optimizer's parameters.

        Raises:
            ValueError: An option of the optimizer is no plain number.
        """
        for connection in self._connections:
            groups = []
            for group in optimizer.param_groups if optimizer is not None else []:
                inside = {names[each] for each in group["params"]}
                keys = [key for key, piece in enumerate(connection.pieces) if piece.key in inside]
                groups.append({**plain_options(group), "keys": keys})
            values = self._values(connection)
            header = {
                "op": "init",
                "num_workers": num_workers,
                "staleness": "inf" if math.isinf(staleness) else staleness,
                "evicts": self._survives,
                "lengths": [len(value) for value in values],
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in values],
                "optimizer": None if optimizer is None else {"name": type(optimizer).__name__, "groups": groups},
            }
            connection.say(partial(connection.send, header, values))
        self._hear_all()

    def enter(self, clock: int) -> None:
        """From now on others wait for this worker; all that enter together give the same clock. See `Store.enter`."""
        self._share()
        answers = [clock]
        while True:
            # Servers may know different clocks of the slowest worker: the highest counts.
            self.clock = max(answers)
            answers = [header["clock"] for header, _ in self._ask_all(self._entrance(self.clock))]
            if len(set(answers)) == 1:
                break
        self.clock = self._known_clock = answers[0]
        self._inside = True

    def leave(self) -> None:
        """Tells the servers that nobody needs to wait for this worker, and that all it has pushed must be in."""
        self._inside = False
        self._ask_all({"op": "leave", **self._who})

    def push_part(self, name: str, gradient: Tensor) -> None:
        """Sends a gradient ahead of the push, to overlap with the rest of backward. It may still change."""
        self._parts[name] = (gradient, gradient._version)
        self._unsent.append(name)
        for connection in self._connections:
            if connection.is_shared:
                self._write(connection, {name: gradient})
        if sum(self._parts[each][0].nbytes for each in self._unsent) >= _PART_BYTES:
            gradients = {each: self._parts[each][0] for each in self._unsent}
            for connection in self._connections:
                keys = self._keys(connection, gradients)
                if not connection.is_shared and keys:
                    tensors = [_cut(gradients, connection.pieces[key]) for key in keys]
                    header = {"op": "part", **self._who, "clock": self.clock + 1, "sent": keys}
                    connection.say(partial(connection.send, header, tensors))
            self._unsent.clear()

    def push(
        self, gradients: Mapping[str, Tensor | None], options: list[dict[str, Any]], max_norm: float | None = None
    ) -> None:
        """Sends gradients, but for those parts that have been sent and have not changed since.

        Their memory must not change before the next pull has come back.

        Args:
            gradients: By name; None where there is none.
            options: Of the optimizer's parameter groups, as they are to be from now on.
            max_norm: In step: clip the mean gradient, over all servers, to this norm.
        """
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        fresh = {
            name: gradient
            for name, gradient in present.items()
            if name not in self._parts
            or self._parts[name][0] is not gradient
            or self._parts[name][1] != gradient._version
        }
        unsent = {name: gradient for name, gradient in present.items() if name in fresh or name in self._unsent}
        self._parts, self._unsent = {}, []
        self.clock += 1
        message = {"op": "push", **self._who, "clock": self.clock, "options": options, "hold": max_norm is not None}
        for connection in self._connections:
            new = fresh if connection.is_shared else unsent
            self._push(connection, message, present, new)
            # Said again, all has to be: a new server has no parts.
            connection.pending = [partial(self._push, connection, message, present, present)]
        if max_norm is not None:
            answers = self._ask_all({"op": "norm", "clock": self.clock})
            norm = math.sqrt(sum(header["square"] for header, _ in answers))
            scale = min(1.0, max_norm / (norm + 1e-6))  # as torch clips
            for connection, (header, _) in zip(self._connections, answers, strict=True):
                connection.send({"op": "release", "version": header["version"], "scale": scale})

    def pull(self, into: Mapping[str, Tensor]) -> tuple[Pulled, set[str]]:
        """Blocks until all servers let this worker proceed, and copies what they hold.

        Args:
            into: Tensors like the weights, by name.

        Returns:
            How it went, and the names that the servers had something for.

        Raises:
            TransportError: A server has refused something, or does not answer.
        """
        start = time.perf_counter()
        answers, present = self._ask_all({"op": "pull", **self._who}), set()
        segment_weights = {} if self.segment is None else self.segment.weights
        for connection, (header, frames) in zip(self._connections, answers, strict=True):
            for position, key in enumerate(header["keys"]):
                piece = connection.pieces[key]
                present.add(piece.key)
                if connection.is_shared:
                    _move(segment_weights, into, piece)
                else:
                    copy_into(_cut(into, piece), frames[position])
        self._known_clock = self.clock
        versions = tuple(header["version"] for header, _ in answers)
        staleness = max(header["staleness"] for header, _ in answers)
        return Pulled(max(versions), versions, staleness, time.perf_counter() - start), present

    def optimizer_state(self) -> dict[str, State]:
        """The servers' optimizer state, by name."""
        shards: list[Mapping[Piece, State]] = []
        for shard, (header, frames) in zip(self.shards, self._ask_all({"op": "state"}), strict=True):
            shards.append(dict(zip(shard, unpack_state(header["state"], frames), strict=False)))
        return merge_state(shards, self._weights)

    def load_optimizer_state(self, state: Mapping[str, State]) -> None:
        """Gives the servers their parts of a state."""
        for connection in self._connections:
            plain, vectors = pack_state(cut_state(state, connection.pieces, self._weights).values())
            connection.say(partial(connection.send, {"op": "load", "state": plain}, vectors))
        self._hear_all()

    def close(self) -> None:
        """Hangs up."""
        self._closed.set()
        self._heart.join()
        for connection in self._connections:
            connection.socket.close()
        if self.segment is not None:
            self.segment.close()
        self._context.term()

    def _beat(self, sockets: list[zmq.Socket[bytes]]) -> None:
        """Tells the servers that this worker lives, whatever its main thread does."""
        while not self._closed.wait(_BEAT_SECONDS):
            for socket in sockets:
                # Not to a server that takes nothing any more: the main thread will say so.
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(encode({"op": "beat", **self._who}), zmq.NOBLOCK)
        for socket in sockets:
            socket.close()

    def _values(self, connection: Connection) -> list[Tensor]:
        return [_cut(self._weights, piece) for piece in connection.pieces]

    @staticmethod
    def _keys(connection: Connection, tensors: Mapping[str, Tensor]) -> list[int]:
        return [key for key, piece in enumerate(connection.pieces) if piece.key in tensors]

    def _write(self, connection: Connection, gradients: Mapping[str, Tensor]) -> None:
        assert self.segment is not None
        for key in self._keys(connection, gradients):
            _move(gradients, self.segment.gradients, connection.pieces[key])

    def _push(
        self,
        connection: Connection,
        message: dict[str, Any],
        present: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
    ) -> None:
        sent: list[int] = []
        if connection.is_shared:
            self._write(connection, new)
        else:
            sent = self._keys(connection, new)
        header = {**message, "keys": self._keys(connection, present), "sent": sent}
        connection.send(header, [_cut(new, connection.pieces[key]) for key in sent])

    def _entrance(self, clock: int) -> dict[str, Any]:
        return {"op": "enter", **self._who, "clock": clock}

    def _share(self) -> None:
        """Offers the servers of this host common memory, once; they may refuse it."""
        near = [connection for connection in self._connections if connection.address.startswith("ipc:")]
        if self.segment is not None or not near:
            return
        self.segment = Segment(self._weights)
        for connection in near:
            connection.say(partial(self._send_share, connection))
            try:
                connection.hear()
            except RefusalError as error:
                log.info("Gradients are sent in messages: %s", error)
            else:
                connection.is_shared = True

    def _send_share(self, connection: Connection) -> None:
        assert self.segment is not None
        place = {"descriptor": self.segment.descriptor, "offsets": self.segment.offsets(connection.pieces)}
        connection.send({"op": "share", **self._who, "pid": os.getpid(), **place})

    def _introduce(self, connection: Connection) -> None:
        """Tells a server that has been started again what it cannot know."""
        if connection.is_shared:
            self._send_share(connection)
        connection.send(self._entrance(self._known_clock) if self._inside else {"op": "leave", **self._who})

    def _ask_all(self, header: dict[str, Any]) -> list[Answer]:
        for connection in self._connections:
            connection.say(partial(connection.send, header))
        return self._hear_all()

    def _hear_all(self) -> list[Answer]:
        return [connection.hear() for connection in self._connections]


def _cut(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
    return in_memory_order(tensors[piece.key])[piece.start : piece.stop]


def _move(source: Mapping[str, Tensor], target: Mapping[str, Tensor], piece: Piece) -> None:
    """Copies a piece, unless both are the same memory."""
    if source[piece.key].data_ptr() != target[piece.key].data_ptr():
        _cut(target, piece).copy_(_cut(source, piece))


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, for a message.

    Raises:
        ValueError: One is no plain value.
    """
    options = {name: value for name, value in group.items() if name != "params"}
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(
            isinstance(each, torch.Tensor) or not isinstance(each, (int, float, str, type(None))) for each in values
        ):
            raise ValueError(f"The optimizer's option {name}={value!r} cannot be sent to a server: use a plain number.")
    return options
