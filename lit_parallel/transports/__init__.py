"""How the bytes of a schedule's messages move. Imports torch, never Lightning."""

from lit_parallel.transports.in_memory import InMemoryTransport
from lit_parallel.transports.process_group import ProcessGroupTransport
from lit_parallel.transports.transport import Traffic, Transport, TransportError

__all__ = ["InMemoryTransport", "ProcessGroupTransport", "Traffic", "Transport", "TransportError"]
