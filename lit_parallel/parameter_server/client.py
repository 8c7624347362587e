"""A worker's side: pushes gradients to all servers and pulls what is new."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor
from torch.optim import Optimizer

from lit_parallel.parameter_server.optimizer_state import State, cut_state, in_memory_order, merge_state
from lit_parallel.parameter_server.partition import Piece, plan_shards
from lit_parallel.parameter_server.wire import CurveKeys, copy_into, decode_header, encode, pack_state, unpack_state
from lit_parallel.transports import TransportError

#: A server that answers nothing for so long, not even a ping, is taken for dead.
_SILENCE_SECONDS = 5.0
_PING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought.

    Attributes:
        version: Updates applied by the server that has applied most.
        staleness: Pushes that this worker was ahead of the slowest one.
        seconds: How long it waited.
    """

    version: int
    staleness: int
    seconds: float


class Client:
    """One worker's connections to all servers.

    Args:
        endpoints: Of the servers.
        worker: This worker's rank.
        weights: By name; the same names, shapes and layouts on all workers.
        keys: As the servers'.
    """

    def __init__(
        self, endpoints: Sequence[str], worker: int, weights: Mapping[str, Tensor], keys: CurveKeys | None = None
    ) -> None:
        self._endpoints, self._worker, self._clock = list(endpoints), worker, 0
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        sizes = {name: (weight.numel(), weight.itemsize) for name, weight in self._weights.items()}
        self.shards = plan_shards(sizes, len(endpoints))
        self._context = zmq.Context()
        self._sockets = [self._connect(endpoint, keys) for endpoint in endpoints]
        self._closed = threading.Event()
        beating = [self._connect(endpoint, keys) for endpoint in endpoints]
        self._heart = threading.Thread(target=self._beat, args=(beating,), name="parameter-server-beat", daemon=True)
        self._heart.start()

    def init(
        self, num_workers: int, staleness: float, optimizer: Optimizer | None, names: Mapping[torch.nn.Parameter, str]
    ) -> None:
        """Gives the servers the weights; one worker calls it, before the others push.

        Args:
            num_workers: How many will push.
            staleness: As in `Store`.
            optimizer: What updates the weights there; None if servers only average gradients.
            names: Of the optimizer's parameters.

        Raises:
            ValueError: An option of the optimizer is no plain number.
        """
        for number, shard in enumerate(self.shards):
            groups = []
            for group in optimizer.param_groups if optimizer is not None else []:
                inside = {names[each] for each in group["params"]}
                groups.append(
                    {**plain_options(group), "keys": [key for key, piece in enumerate(shard) if piece.key in inside]}
                )
            values = [self._cut(self._weights, piece) for piece in shard]
            header = {
                "op": "init",
                "num_workers": num_workers,
                "staleness": "inf" if math.isinf(staleness) else staleness,
                "lengths": [len(value) for value in values],
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in values],
                "optimizer": None if optimizer is None else {"name": type(optimizer).__name__, "groups": groups},
            }
            self._send(number, header, values)
        self._receive_all()

    def push(self, gradients: Mapping[str, Tensor | None], options: list[dict[str, Any]]) -> None:
        """Sends gradients; their memory must not change before the next pull has come back.

        Args:
            gradients: By name; None where there is none.
            options: Of the optimizer's parameter groups, as they are to be from now on.
        """
        self._clock += 1
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        for number, shard in enumerate(self.shards):
            keys = [key for key, piece in enumerate(shard) if piece.key in present]
            header = {"op": "push", "worker": self._worker, "clock": self._clock, "keys": keys, "options": options}
            self._send(number, header, [self._cut(present, shard[key]) for key in keys])

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
        answers, present = self._ask_all({"op": "pull", "worker": self._worker}), set()
        for shard, (header, frames) in zip(self.shards, answers, strict=True):
            for key, frame in zip(header["keys"], frames, strict=True):
                present.add(shard[key].key)
                copy_into(self._cut(into, shard[key]), frame)
        version, staleness = (max(header[name] for header, _ in answers) for name in ("version", "staleness"))
        return Pulled(version, staleness, time.perf_counter() - start), present

    def leave(self) -> None:
        """Tells the servers that nobody needs to wait for this worker, and that all it has pushed must be in."""
        self._ask_all({"op": "leave", "worker": self._worker})

    def enter(self) -> None:
        """Begins again, together with all others, once all have left."""
        self._clock = 0
        self._ask_all({"op": "enter", "worker": self._worker})

    def optimizer_state(self) -> dict[str, State]:
        """The servers' optimizer state, by name."""
        shards: list[Mapping[Piece, State]] = []
        for shard, (header, frames) in zip(self.shards, self._ask_all({"op": "state"}), strict=True):
            shards.append(dict(zip(shard, unpack_state(header["state"], frames), strict=False)))
        return merge_state(shards, self._weights)

    def load_optimizer_state(self, state: Mapping[str, State]) -> None:
        """Gives the servers their parts of a state."""
        for number, shard in enumerate(self.shards):
            plain, vectors = pack_state(cut_state(state, shard, self._weights).values())
            self._send(number, {"op": "load", "state": plain}, vectors)
        self._receive_all()

    def close(self) -> None:
        """Hangs up."""
        self._closed.set()
        self._heart.join()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _connect(self, endpoint: str, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(1000 * _SILENCE_SECONDS))
        if keys is not None:
            socket.curve_serverkey = keys.server_public.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.worker_public.encode(), keys.worker_secret.encode()
        socket.connect(endpoint)
        return socket

    def _beat(self, sockets: list[zmq.Socket[bytes]]) -> None:
        """Tells the servers that this worker lives, whatever its main thread does."""
        while not self._closed.wait(_PING_SECONDS):
            for socket in sockets:
                # Not to a server that takes nothing any more: the main thread will say so.
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(encode({"op": "beat", "worker": self._worker}), zmq.NOBLOCK)
        for socket in sockets:
            socket.close()

    @staticmethod
    def _cut(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
        return in_memory_order(tensors[piece.key])[piece.start : piece.stop]

    def _send(self, number: int, header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        try:
            self._sockets[number].send_multipart(encode(header, tensors), copy=False)
        except zmq.Again as error:
            raise self._silent(number) from error

    def _silent(self, number: int) -> TransportError:
        return TransportError(
            f"Worker {self._worker}: server {number} at {self._endpoints[number]} has not answered for"
            f" {_SILENCE_SECONDS:.0f} seconds; it has ended, cannot be reached, or has other keys."
        )

    def _ask_all(self, header: dict[str, Any]) -> list[tuple[dict[str, Any], list[zmq.Frame]]]:
        for number in range(len(self._sockets)):
            self._send(number, header)
        return self._receive_all()

    def _receive_all(self) -> list[tuple[dict[str, Any], list[zmq.Frame]]]:
        return [self._receive(number) for number in range(len(self._sockets))]

    def _receive(self, number: int) -> tuple[dict[str, Any], list[zmq.Frame]]:
        """The answer of a server; it may wait for slower workers, but must answer pings meanwhile."""
        socket, heard = self._sockets[number], time.monotonic()
        while True:
            if socket.poll(int(1000 * _PING_SECONDS)):
                first, *frames = socket.recv_multipart(copy=False)
                header, heard = decode_header(first), time.monotonic()
                if "error" in header:
                    raise TransportError(f"Server {number} at {self._endpoints[number]}: {header['error']}.")
                if header["op"] != "ping":
                    return header, frames
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                raise self._silent(number)
            else:
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(encode({"op": "ping"}), zmq.NOBLOCK)


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
