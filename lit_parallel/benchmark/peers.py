"""Other libraries' all-reduce on one host, where they are installed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor

AllReduce = Callable[[Tensor], object]
_DEEPSPEED = RequirementCache("deepspeed")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (DeepSpeed's)


def mpi_place() -> tuple[int, int] | None:
    """This process's rank and their number if mpiexec (of MPICH or Open MPI) started it, else None."""
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def call_under_mpi(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with a gloo group of the processes that mpiexec started, with one torch thread each."""
    from mpi4py import MPI  # noqa: PLC0415  (importing it starts MPI)

    world = MPI.COMM_WORLD
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = world.bcast(free.getsockname()[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.Get_rank(), world_size=world.Get_size()
    )
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def installed_peers() -> dict[str, AllReduce]:
    """In-place sums over the ranks of the default process group, by name."""
    peers: dict[str, AllReduce] = {}
    if mpi_place() is not None:
        from mpi4py import MPI  # noqa: PLC0415

        library = MPI.Get_library_version().replace(":", " ").split()
        name = " ".join(library[:2]) if library[0] == "Open" else f"MPICH {library[2]}"
        peers[f"{name}, MPI_Allreduce"] = lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    if _DEEPSPEED:
        peers["DeepSpeed, shared memory"] = _load_deepspeed()
    return peers


def _load_deepspeed() -> AllReduce:
    """Compiles DeepSpeed's CPU kernel the first time."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    address: list[Any] = [None]
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = [str(free.getsockname()[1])]
    dist.broadcast_object_list(address)
    # What its launcher sets; the names of its segments are made of them.
    os.environ.update(
        DS_ACCELERATOR="cpu", LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(address[0])
    )
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # noqa: PLC0415

    ShareMemCommBuilder().load(verbose=False).initialize(world_size, rank)
    all_reduce: AllReduce = torch.ops.deepspeed.inference_all_reduce_
    all_reduce(torch.ones(1))
    dist.barrier()
    if rank == 0:  # all have mapped them; it leaves their names behind
        for segment in _SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{address[0]}_*"):
            segment.unlink()
    return all_reduce
