"""Collectives among those who live: three members in threads, through one store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lit_parallel.parameter_server.elastic_group import ElasticGroup
from lit_parallel.transports import TransportError

TIMEOUT = timedelta(seconds=30)


class Members:
    """Each in a thread of its own, with its own connection to the store."""

    def __init__(self, world_size):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pool, self.made = ThreadPoolExecutor(world_size), []
        self.groups = [self.make(rank, world_size) for rank in range(world_size)]

    def make(self, rank, world_size=3):
        self.made.append(ElasticGroup(self.store.clone(), rank, world_size, TIMEOUT))
        return self.made[-1]

    def all(self, function, groups=None):
        futures = [self.pool.submit(function, group) for group in groups or self.groups]
        return [future.result() for future in futures]

    def close(self):
        for group in self.made:
            group.shutdown()
        self.pool.shutdown()


@pytest.fixture
def members(monkeypatch):
    monkeypatch.setattr("lit_parallel.parameter_server.elastic_group._SILENCE_SECONDS", 1.5)
    members = Members(3)
    yield members
    members.close()


def all_reduce(operation, dtype=torch.float32):
    def run(group):
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        tensor = torch.tensor([[1, 2 + group.rank()]], dtype=dtype)
        group.allreduce([tensor], options).wait()
        return tensor.tolist()

    return run


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (dist.ReduceOp.SUM, [[3, 9]]),
        (dist.ReduceOp.AVG, [[1, 3]]),
        (dist.ReduceOp.PRODUCT, [[1, 24]]),
        (dist.ReduceOp.MIN, [[1, 2]]),
        (dist.ReduceOp.MAX, [[1, 4]]),
    ],
)
def test_all_reduce(members, operation, expected):
    assert members.all(all_reduce(operation)) == [expected] * 3
    if operation != dist.ReduceOp.AVG:
        assert members.all(all_reduce(operation, torch.int32)) == [expected] * 3


def test_what_it_cannot_reduce_by_is_said(members):
    with pytest.raises(NotImplementedError, match="reduces by one of SUM, AVG, PRODUCT, MIN, MAX"):
        members.all(all_reduce(dist.ReduceOp.BXOR))


def test_broadcast_gather_and_barrier(members):
    def run(group):
        options = dist.BroadcastOptions()
        options.rootRank = 2
        large = torch.full((3 << 20,), float(group.rank()))  # 12 MiB: several pieces
        group.broadcast([large], options).wait()
        gathered = [torch.empty(2, dtype=torch.int64) for _ in range(3)]
        group.allgather([gathered], [torch.tensor([group.rank(), 7])]).wait()
        flat = torch.empty(3)
        group._allgather_base(flat, torch.tensor([float(group.rank())])).wait()
        group.barrier().wait()
        return large.unique().tolist(), [each.tolist() for each in gathered], flat.tolist()

    assert members.all(run) == [([2.0], [[0, 7], [1, 7], [2, 7]], [0.0, 1.0, 2.0])] * 3


def test_the_others_go_on_without_a_member_that_ends(members, caplog):
    members.all(all_reduce(dist.ReduceOp.SUM))
    dead = members.groups.pop(1)
    dead.shutdown()  # no beats any more
    start = time.monotonic()
    members.all(all_reduce(dist.ReduceOp.SUM))
    assert time.monotonic() - start < 10
    assert [(group.size(), group.rank()) for group in members.groups] == [(2, 0), (2, 1)]
    assert members.all(all_reduce(dist.ReduceOp.SUM)) == [[[2, 5]]] * 2
    assert "Rank 1 has not been heard for" in caplog.text
    # It was only asleep: it must not take part as though nothing had happened.
    with pytest.raises(TransportError, match="Rank 1 was not heard .* Start it again"):
        dead.barrier()


def test_a_gather_that_began_with_more_members_ends_with_zeros(members):
    members.groups.pop(1).shutdown()

    def run(group):
        gathered = [torch.empty(1) for _ in range(3)]
        group.allgather([gathered], [torch.tensor([group.rank() + 1.0])])
        return torch.cat(gathered).tolist()

    assert [sorted(each) for each in members.all(run)] == [[0.0, 1.0, 3.0]] * 2


def test_a_member_that_is_started_again_is_alone_until_it_is_let_in(members, caplog):
    members.groups[1].shutdown()
    others = [members.groups[0], members.groups[2]]
    back = members.make(1)
    assert (back.is_alone, back.life, back.size(), back.rank()) == (True, 2, 1, 0)
    assert all_reduce(dist.ReduceOp.SUM)(back) == [[1, 2]]
    told = []
    joining = threading.Thread(target=lambda: told.append(back.join()))
    joining.start()
    while not members.store.check(["join/1"]):
        time.sleep(0.01)
    members.all(lambda group: group.admit(lambda: b"news"), others)
    joining.join()
    assert told == [b"news"]
    assert all_reduce(dist.ReduceOp.SUM)(back) == [[1, 2]]  # not in yet
    back.enter()
    assert members.all(all_reduce(dist.ReduceOp.SUM), [others[0], back, others[1]]) == [[[3, 9]]] * 3
    members.all(lambda group: group.admit(lambda: b"nobody"), [others[0], back, others[1]])
    assert "Rank 1 is back" in caplog.text


def test_without_the_first_rank_nobody_goes_on():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ElasticGroup(store.clone(), 1, 2, TIMEOUT)
    holder = [store]
    del store
    timer = threading.Timer(0.5, holder.clear)
    timer.start()
    with pytest.raises(TransportError, match="Rank 1 lost contact with rank 0"):
        group.barrier()
    timer.join()
    group.shutdown()
