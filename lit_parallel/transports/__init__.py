"""How the bytes of a schedule's messages move. Imports torch, never Lightning."""

from lit_parallel.transports.in_memory import InMemoryTransport
from lit_parallel.transports.links import OtherHostError
from lit_parallel.transports.process_group import ProcessGroupTransport
from lit_parallel.transports.shared_memory import NoRoomError, SharedMemoryTransport
from lit_parallel.transports.transport import Traffic, Transport, TransportError

__all__ = [
    "InMemoryTransport",
    "NoRoomError",
    "OtherHostError",
    "ProcessGroupTransport",
    "SharedMemoryTransport",
    "Traffic",
    "Transport",
    "TransportError",
]
