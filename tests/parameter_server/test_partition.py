from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_parallel.parameter_server import Piece, plan_shards


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8])), max_size=12), st.integers(1, 9))
def test_every_element_has_one_server_and_servers_hold_equal_parts(sizes, num_shards):
    keys = {f"key{number}": size for number, size in enumerate(sizes)}
    shards = plan_shards(keys, num_shards)
    assert len(shards) == num_shards
    for key, (num_elements, _) in keys.items():
        own = [piece for shard in shards for piece in shard if piece.key == key]
        assert [piece.start for piece in own] == ([0, *(piece.stop for piece in own)][:-1])
        assert sum(len(piece) for piece in own) == num_elements
        assert all(len(piece) > 0 for piece in own)
    num_bytes = [sum(len(piece) * keys[piece.key][1] for piece in shard) for shard in shards]
    assert max(num_bytes) - min(num_bytes) <= 16  # an element at either end


def test_small_keys_share_a_shard_and_large_ones_are_split():
    keys = {"small": (2, 4), "large": (10, 4), "last": (4, 4)}
    assert plan_shards(keys, 2) == [
        (Piece("small", 0, 2), Piece("large", 0, 6)),
        (Piece("large", 6, 10), Piece("last", 0, 4)),
    ]


def test_a_number_of_shards_below_one_is_refused():
    with pytest.raises(ValueError, match="at least one shard, not 0"):
        plan_shards({}, 0)
