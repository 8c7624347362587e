"""Running a function on several ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

#: Imported once for all ranks ever started: importing Lightning costs seconds.
_PRELOAD = ["lightning.pytorch", "lit_parallel", "lit_parallel.testing"]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed.

    Attributes:
        exit_code: Of its process; negative for a signal.
        message: Its traceback, or "" where the process ended without a word.
    """

    exit_code: int | None
    message: str


class RanksError(RuntimeError):
    """At least one rank failed; the message holds the tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    may_fail: Collection[int] = (),
) -> list[Any]:
    """Calls a function once on every rank, each in a process with a gloo group and one torch thread.

    The environment is as torchrun makes it, so a Trainer made in the function uses these processes.

    Args:
        function: Importable from its module, as for multiprocessing's spawn.
        world_size: Number of ranks.
        args: Passed on; pickled.
        timeout: Seconds after which all ranks are killed.
        may_fail: Ranks whose failure is a result and no error.

    Returns:
        What each rank returned, by rank; a `RankFailure` for ranks of `may_fail` that failed.

    Raises:
        RanksError: A rank raised, ended or took too long.
    """
    context = preloaded_context()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(sender, rank, world_size, port, function, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)

    deadline = time.monotonic() + timeout
    outcomes: list[Any] = []
    for receiver, process in zip(pipes, processes, strict=True):
        outcomes.append(_receive(receiver, deadline))
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    failures = {
        rank: RankFailure(process.exitcode, "" if outcome is None else outcome[1])
        for rank, (outcome, process) in enumerate(zip(outcomes, processes, strict=True))
        if outcome is None or not outcome[0] or process.exitcode != 0
    }
    for process in processes:
        process.close()
    if late or not set(may_fail).issuperset(failures):
        raise RanksError(
            "\n".join(
                [f"ranks {late} did not end within {timeout} seconds"] * bool(late)
                + [
                    f"rank {rank} ended with exit code {each.exit_code}\n{each.message}"
                    for rank, each in failures.items()
                ]
            )
        )
    return [failures.get(rank) or outcome[1] for rank, outcome in enumerate(outcomes)]


def preloaded_context() -> multiprocessing.context.ForkServerContext:
    """Starts processes that have imported Lightning already."""
    # Forked from a small server process: a fork of this process would inherit its threads' locks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _receive(receiver: Connection, deadline: float) -> tuple[bool, Any] | None:
    """Whether a rank succeeded and with what, or None where it ended or went on without a word."""
    with receiver:
        try:
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                outcome: tuple[bool, Any] = pickle.loads(receiver.recv_bytes())  # noqa: S301  (from our own process)
                return outcome
        except EOFError:
            pass  # the rank ended; its exit code says how
    return None


def _run_rank(
    sender: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        outcome = (True, function(*args))
    except Exception:
        outcome = (False, traceback.format_exc())
    # Plain pickle: multiprocessing would send tensors as handles that die with this process.
    sender.send_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()
