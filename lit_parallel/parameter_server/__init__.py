"""Parameter servers: keys cut into shards, and servers that update them."""

from lit_parallel.parameter_server.partition import Piece, plan_shards
from lit_parallel.parameter_server.shared_weights import ELEMENT_WISE, SharedWeights

__all__ = ["ELEMENT_WISE", "Piece", "SharedWeights", "plan_shards"]
