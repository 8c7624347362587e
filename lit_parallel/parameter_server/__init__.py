"""Parameter servers: keys cut into shards, and servers that update them."""

from lit_parallel.parameter_server.optimizer_state import ELEMENT_WISE
from lit_parallel.parameter_server.partition import Piece, plan_shards
from lit_parallel.parameter_server.shared_weights import SharedWeights

__all__ = ["ELEMENT_WISE", "Piece", "SharedWeights", "plan_shards"]
