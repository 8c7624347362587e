"""The communication hook between torch's DistributedDataParallel and a transport."""

# No `from __future__ import annotations` here: DistributedDataParallel compares the hook's annotations with classes.

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lit_parallel.schedules.schedule import Schedule
from lit_parallel.transports.transport import Transport

GradientHook = Callable[[object, GradBucket], Future[Tensor]]


class GradientSync:
    """Averages each bucket of gradients over all ranks by running a schedule on a transport.

    Args:
        transport: Moves the chunks; closed by `close`.
        schedule: The all-reduce to run on every bucket.
        device: Where the gradients live.
        overlap: Run the schedule beside the rest of backward: in a worker thread on CPU, on a stream of its own on
            CUDA. Buckets are run one after the other, in the same order on every rank.
    """

    def __init__(self, transport: Transport, schedule: Schedule, device: torch.device, *, overlap: bool) -> None:
        self.transport = transport
        self._schedule = schedule
        self._future_devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1, "gradient-sync") if overlap and device.type != "cuda" else None

    def make_hook(self) -> GradientHook:
        """The function to give to `DistributedDataParallel.register_comm_hook`."""

        def synchronise_gradients(state: object, bucket: GradBucket) -> Future[Tensor]:
            future: Future[Any] = Future(devices=self._future_devices)
            if self._worker is None:
                self._run(bucket.buffer(), future)
            else:
                self._worker.submit(self._run, bucket.buffer(), future)
            return future

        return synchronise_gradients

    def close(self) -> None:
        """Ends the worker and closes the transport. A run that waits for a peer ends with an error first."""
        self.transport.close()
        if self._worker is not None:
            self._worker.shutdown()

    def _run(self, gradients: Tensor, future: Future[Tensor]) -> None:
        try:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
                gradients.record_stream(self._stream)
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                # DistributedDataParallel leaves the division to its hook: sums become means here, once.
                self.transport.run(self._schedule, gradients, scale=1 / self.transport.world_size)
                future.set_result(gradients)
        except Exception as error:
            # Handed to backward, which raises it in the main thread.
            future.set_exception(error)  # type: ignore[arg-type]


def make_local_hook(take: Callable[[Tensor], None]) -> GradientHook:
    """A hook that gives each bucket's gradients to a function and leaves them as they are."""

    def take_gradients(state: object, bucket: GradBucket) -> Future[Tensor]:
        future: Future[Any] = Future()
        try:
            take(bucket.buffer())
            future.set_result(bucket.buffer())
        except Exception as error:
            future.set_exception(error)
        return future

    return take_gradients
