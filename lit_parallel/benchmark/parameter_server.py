"""A push and a pull between one worker and one server on one host, and what else moves the same bytes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch import Tensor
from torch.distributed import rpc

from lit_parallel.parameter_server.client import Client
from lit_parallel.parameter_server.server import Server
from lit_parallel.schedules import get_algorithm
from lit_parallel.testing import run_ranks
from lit_parallel.transports import SharedMemoryTransport

RAW = "raw ZeroMQ, there and back"
GLOO = "gloo's all_reduce"
_MESSAGES = "push and pull by message"
_RPC = "torch RPC, there and back"


def time_push_pull(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Times pushes and pulls of float32 gradients; the server updates weights with SGD.

    Args:
        num_bytes: Of the gradients, and of the weights.
        rounds: How often all contenders take their turn.

    Returns:
        Seconds of each contender in each round.
    """
    results: list[dict[str, list[float]]] = run_ranks(_time, 2, num_bytes, rounds, timeout=3600)
    return results[0]


def _time(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Rank 0 is the worker and rank 1 the server; both take part in all-reduces."""
    is_worker = dist.get_rank() == 0
    weight, gradient, summed, shared = (torch.ones(num_bytes // 4) for _ in range(4))
    transport, schedule = SharedMemoryTransport(), get_algorithm("ps").make_schedule(2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rpc())
        places: list[str] = [""] * 2
        if not is_worker:
            places = [stack.enter_context(_serving()), stack.enter_context(_echoing())]
        dist.broadcast_object_list(places, 1)
        contenders: dict[str, Callable[[], object]] = {}
        if is_worker:
            client = Client([places[0]], 0, {"weight": weight})
            stack.callback(client.close)
            parameter = torch.nn.Parameter(weight)
            client.init(1, 0, torch.optim.SGD([parameter], lr=0.1), {parameter: "weight"})
            echo = stack.enter_context(_connected(places[1]))

            content: Any = gradient.numpy()

            def push_and_pull() -> None:
                client.push({"weight": gradient}, [{}])
                client.pull({"weight": weight})

            def send_and_receive() -> None:
                echo.send(content, copy=False)
                echo.recv(copy=False)

            contenders |= {RAW: send_and_receive, _MESSAGES: push_and_pull}
            contenders[_RPC] = lambda: rpc.rpc_sync("server", _step, (gradient,))
        collectives: dict[str, Callable[[], object]] = {
            GLOO: lambda: dist.all_reduce(summed),
            "ps, shared memory": lambda: transport.run(schedule, shared),
        }
        names = [RAW, _MESSAGES, _RPC, *collectives]
        contenders |= collectives
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for name in names:
                dist.barrier()
                start = time.perf_counter()
                if name in contenders:
                    contenders[name]()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
        dist.barrier()
    transport.close()
    return seconds


@contextlib.contextmanager
def _serving() -> Iterator[str]:
    server = Server("tcp://127.0.0.1:*")
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.endpoint
    server.close()
    thread.join()


@contextlib.contextmanager
def _echoing() -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind("tcp://127.0.0.1:*")
        done = threading.Event()

        def echo() -> None:
            while not done.is_set():
                if socket.poll(100):
                    socket.send(socket.recv(copy=False), copy=False)

        thread = threading.Thread(target=echo)
        thread.start()
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
        done.set()
        thread.join()


@contextlib.contextmanager
def _connected(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(endpoint)
        yield socket


@contextlib.contextmanager
def _rpc() -> Iterator[None]:
    """As the parameter server of torch's RPC tutorial: gradients as the argument of a call, weights as its result."""
    port = int(os.environ["MASTER_PORT"]) + 1
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    name = ("worker", "server")[dist.get_rank()]
    rpc.init_rpc(name, rank=dist.get_rank(), world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    yield
    rpc.shutdown()


_weights: dict[int, Tensor] = {}


def _step(gradient: Tensor) -> Tensor:
    weight = _weights.setdefault(len(gradient), torch.ones_like(gradient))
    return weight.sub_(gradient, alpha=0.1)
