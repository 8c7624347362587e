"""A push and a pull between one worker and one server on one host, and what else moves the same bytes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
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
ONE_SERVER = "1 server"
_MESSAGES = "push and pull by message"
_SHARED = "push and pull through shared memory"
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


def count_bytes(num_bytes: int) -> dict[str, list[float]]:
    """Megabytes that the busiest of 1, 2 and 4 servers receives in messages when float32 gradients are pushed."""
    gradients = {"large": torch.ones(num_bytes // 8), "small": torch.ones(num_bytes // 8)}
    counted = {}
    for number in (1, 2, 4):
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(_serving("tcp://127.0.0.1:*")) for _ in range(number)]
            client = stack.enter_context(_client([each.endpoint for each in servers], gradients))
            before = [server.traffic.bytes_received for server in servers]
            client.push(gradients, [{}])
            client.pull(gradients)
            after = [server.traffic.bytes_received for server in servers]
        busiest = max(new - old for new, old in zip(after, before, strict=True))
        counted["1 server" if number == 1 else f"{number} servers"] = [busiest / 1e6]
    return counted


def _time(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Rank 0 is the worker and rank 1 the server; both take part in all-reduces."""
    is_worker = dist.get_rank() == 0
    weight, gradient, summed, shared = (torch.ones(num_bytes // 4) for _ in range(4))
    transport, schedule = SharedMemoryTransport(), get_algorithm("ps").make_schedule(2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rpc())
        places: list[str] = [""] * 3
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if not is_worker:
            servers = [stack.enter_context(_serving(each)) for each in ("tcp://127.0.0.1:*", f"ipc://{folder}/server")]
            places = [stack.enter_context(_echoing()), *(server.endpoint for server in servers)]
        dist.broadcast_object_list(places, 1)
        contenders: dict[str, Callable[[], object]] = {}
        if is_worker:
            echo = stack.enter_context(_connected(places[0]))
            clients = [stack.enter_context(_client([place], {"weight": weight})) for place in places[1:]]

            content: Any = gradient.numpy()

            def push_and_pull(client: Client) -> None:
                near = client.segment  # where gradients and weights can be in shared memory, they are
                client.push({"weight": gradient} if near is None else near.gradients, [{}])
                client.pull({"weight": weight} if near is None else near.weights)

            def send_and_receive() -> None:
                echo.send(content, copy=False)
                echo.recv(copy=False)

            contenders[RAW] = send_and_receive
            contenders |= {
                name: partial(push_and_pull, client) for name, client in zip((_MESSAGES, _SHARED), clients, strict=True)
            }
            contenders[_RPC] = lambda: rpc.rpc_sync("server", _step, (gradient,))
        collectives: dict[str, Callable[[], object]] = {
            GLOO: lambda: dist.all_reduce(summed),
            "ps, shared memory": lambda: transport.run(schedule, shared),
        }
        names = [RAW, _MESSAGES, _RPC, _SHARED, *collectives]
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
def _serving(endpoint: str) -> Iterator[Server]:
    server = Server(endpoint)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join()


@contextlib.contextmanager
def _client(addresses: list[str], weights: dict[str, Tensor]) -> Iterator[Client]:
    client = Client(addresses, 0, weights)
    names = {torch.nn.Parameter(weight): name for name, weight in weights.items()}
    client.init(1, 0, torch.optim.SGD(names, lr=0.1), names)
    client.enter(0)
    yield client
    client.close()


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
