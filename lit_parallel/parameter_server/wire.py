"""Messages between workers and servers: ZeroMQ frames of a small JSON header and raw tensor bytes, never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from lit_parallel.parameter_server.optimizer_state import State
from lit_parallel.parameter_server.store import RefusedError

DTYPES = {
    str(each).removeprefix("torch."): each for each in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """CurveZMQ keys of a training's servers and of its workers: whoever lacks them is not heard."""

    server_public: str
    server_secret: str
    worker_public: str
    worker_secret: str

    @classmethod
    def generate(cls) -> CurveKeys:
        """New random keys."""
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(each.decode() for each in pairs))

    def to_json(self) -> str:
        """For a file that only its owner may read."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CurveKeys:
        """The reverse of `to_json`.

        Raises:
            ValueError: The text holds no keys.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"these are no keys of a parameter server: {error}") from error


def encode(header: dict[str, Any], tensors: Sequence[Tensor] = ()) -> list[Any]:
    """The frames of a message. Tensors are 1-D and contiguous; their frames are their own memory."""
    return [json.dumps(header).encode(), *(each.view(torch.uint8).numpy() for each in tensors)]


def decode_header(frame: zmq.Frame) -> dict[str, Any]:
    """The header of a message.

    Raises:
        RefusedError: It is none.
    """
    if len(frame) > _MAX_HEADER_BYTES:
        raise RefusedError(f"a header of {len(frame)} bytes; at most {_MAX_HEADER_BYTES} are allowed")
    try:
        header = json.loads(frame.bytes)
    except (ValueError, RecursionError) as error:
        raise RefusedError("the header is not JSON") from error
    if not isinstance(header, dict):
        raise RefusedError("the header is not a JSON object")
    return header


def integer(header: dict[str, Any], name: str) -> int:
    """A whole number of the header.

    Raises:
        RefusedError: It is missing, or something else.
    """
    value = header.get(name)
    if type(value) is not int:
        raise RefusedError(f"{name!r} must be a whole number")
    return value


def number(header: dict[str, Any], name: str) -> float:
    """A finite number of the header.

    Raises:
        RefusedError: It is missing, or something else.
    """
    value = header.get(name)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RefusedError(f"{name!r} must be a finite number")
    return float(value)


def integers(header: dict[str, Any], name: str) -> list[int]:
    """A list of whole numbers of the header, without repetition.

    Raises:
        RefusedError: It is missing, or something else.
    """
    values = header.get(name)
    if (
        not isinstance(values, list)
        or any(type(value) is not int for value in values)
        or len(set(values)) < len(values)
    ):
        raise RefusedError(f"{name!r} must be a list of different whole numbers")
    return values


def pack_state(states: Iterable[State]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Optimizer state of several parameters as plain values for a header, and vectors for frames."""
    plain: list[dict[str, Any]] = []
    vectors: list[Tensor] = []
    for state in states:
        plain.append({})
        for name, value in state.items():
            if not isinstance(value, Tensor):
                plain[-1][name] = {"value": value}
            elif value.dim() == 0:
                plain[-1][name] = {"value": value.item(), "dtype": _name_of(value)}
            else:
                plain[-1][name] = {"frame": len(vectors), "dtype": _name_of(value)}
                vectors.append(value)
    return plain, vectors


def unpack_state(plain: list[dict[str, Any]], frames: Sequence[zmq.Frame]) -> list[State]:
    """The reverse of `pack_state`; what fails does so with the errors of Python's containers."""
    states: list[State] = []
    for entries in plain:
        states.append({})
        for name, entry in entries.items():
            if "frame" in entry:
                frame, dtype = frames[entry["frame"]], DTYPES[entry["dtype"]]
                states[-1][name] = torch.empty(len(frame) // dtype.itemsize, dtype=dtype)
                copy_into(states[-1][name], frame)
            else:
                value = entry["value"]
                states[-1][name] = torch.tensor(value, dtype=DTYPES[entry["dtype"]]) if "dtype" in entry else value
    return states


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def copy_into(target: Tensor, frame: zmq.Frame) -> None:
    """Copies a frame's bytes into a 1-D tensor.

    Raises:
        RefusedError: Their number differs.
    """
    if len(frame) != target.nbytes:
        raise RefusedError(f"a frame has {len(frame)} bytes where {target.nbytes} belong")
    target.view(torch.uint8).numpy()[:] = np.frombuffer(frame.buffer, dtype=np.uint8)
