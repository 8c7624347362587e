"""What a rank sees when another one goes."""

from __future__ import annotations

import time

import pytest

from lit_parallel.schedules import ring
from lit_parallel.transports import TransportError


def run_until_lost(transport, tensor):
    """Runs a ring until it fails, and returns the seconds that this took and the error's message."""
    schedule = ring(transport.world_size)
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        while True:
            transport.run(schedule, tensor)
    return time.monotonic() - start, str(caught.value)
