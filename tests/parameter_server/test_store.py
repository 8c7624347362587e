"""The store under every order of events: no deadlock, bounded staleness, nothing counted twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_parallel.parameter_server.store import RefusedError, Store, check_staleness


def gradient(worker, clock):
    """Whole numbers, so that sums are exact in any order."""
    return {0: torch.full((3,), float(100 * worker + clock)), 1: torch.full((1,), float(clock))}


def make_store(num_workers, staleness):
    values = [torch.zeros(3), torch.zeros(1)]

    def descend(worker, gradients, options):
        for key, value in gradients.items():
            values[key] -= value if staleness == 0 else value / num_workers

    return Store(values, num_workers, staleness, descend)


@given(st.data(), st.integers(1, 4), st.sampled_from([0, 1, 2, 5, math.inf]))
def test_all_orders_end_within_the_bound(data, num_workers, staleness):
    store, num_steps = make_store(num_workers, staleness), 4
    clocks, waiting = [0] * num_workers, set()
    while waiting or min(clocks) < num_steps:
        pulling = [worker for worker in waiting if store.may_pull(worker)]
        pushing = [worker for worker in range(num_workers) if worker not in waiting and clocks[worker] < num_steps]
        assert pulling or pushing, "a deadlock"
        event = data.draw(
            st.sampled_from([*(("pull", each) for each in pulling), *(("push", each) for each in pushing)])
        )
        kind, worker = event
        if kind == "push":
            clocks[worker] += 1
            assert store.push(worker, clocks[worker], gradient(worker, clocks[worker]), [])
            assert not store.push(worker, clocks[worker], gradient(worker, clocks[worker]), [])  # sent again
            waiting.add(worker)
        else:
            pull = store.pull(worker)
            assert pull.staleness == clocks[worker] - min(clocks) <= staleness
            waiting.remove(worker)
            if staleness == 0:  # as if one after the other: all gradients of all earlier steps, averaged
                assert pull.version == clocks[worker]
                steps = range(1, clocks[worker] + 1)
                expected = -sum(gradient(each, step)[0] for each in range(num_workers) for step in steps) / num_workers
                torch.testing.assert_close(store.values[0], expected)
    assert store.version == (num_steps if staleness == 0 else num_steps * num_workers)
    total = sum(gradient(worker, step)[0] for worker in range(num_workers) for step in range(1, num_steps + 1))
    torch.testing.assert_close(store.values[0], -total / num_workers)


def test_a_pull_waits_for_the_slowest():
    store = make_store(2, 1)
    store.push(0, 1, gradient(0, 1), [])
    assert store.may_pull(0)
    store.push(0, 2, gradient(0, 2), [])
    assert not store.may_pull(0)
    store.push(1, 1, gradient(1, 1), [])
    assert store.may_pull(0)


def test_nobody_waits_for_who_has_left():
    store = make_store(3, 0)
    for worker in (0, 1):
        store.push(worker, 1, gradient(worker, 1), [])
    assert not store.may_pull(0)
    store.leave(2)
    assert store.may_pull(0)
    assert store.version == 1
    torch.testing.assert_close(store.values[0], -(gradient(0, 1)[0] + gradient(1, 1)[0]) / 3)
    for worker in (0, 1):
        store.leave(worker)
        assert store.may_pull(worker)
    for worker in range(3):
        assert store.enter(worker, 7) == 7
    assert set(store.clocks.values()) == {7}
    with pytest.raises(RefusedError, match="there is no worker 3"):
        store.enter(3, 7)


def test_who_comes_late_holds_up_nobody():
    store = make_store(3, 2)
    store.leave(2)
    for clock in (1, 2, 3):
        for worker in (0, 1):
            store.push(worker, clock, gradient(worker, clock), [])
    store.push(1, 4, gradient(1, 4), [])
    assert store.enter(2, 0) == 3  # with the slowest
    assert store.may_pull(1)
    assert store.enter(2, 5) == 5
    assert store.enter(2, 4) == 5  # said again by a worker that cannot know what was counted


def test_held_gradients_wait_for_their_scale():
    store = make_store(2, 0)
    for worker in (1, 0):
        assert store.norm.clock == 0
        store.push(worker, 1, gradient(worker, 1), [], hold=True)
    mean = (gradient(0, 1)[0] + gradient(1, 1)[0]) / 2
    assert not store.may_pull(0)
    assert (store.norm.clock, store.norm.version) == (1, 0)
    assert store.norm.square == pytest.approx(mean.double().square().sum().item() + 1)
    for version in (1, 0, 0):  # for another version, and twice: without effect
        store.release(version, 0.5)
    assert store.may_pull(0)
    assert store.version == 1
    torch.testing.assert_close(store.values[0], -mean / 2)


def test_without_update_values_are_means_of_what_is_there():
    store = Store([torch.zeros(2), torch.zeros(1), torch.zeros(1)], 2, 0, None)
    store.push(1, 1, {0: torch.tensor([2.0, 4.0])}, [])
    store.push(0, 1, {0: torch.tensor([0.0, 2.0]), 2: torch.tensor([1.0])}, [])
    assert store.present == {0, 2}
    assert store.values[0].tolist() == [1.0, 3.0]
    assert store.values[2].tolist() == [0.5]


@pytest.mark.parametrize(
    ("worker", "clock", "gradients", "message"),
    [
        (2, 1, {}, "worker 2 is not in: it has left, or was taken for dead"),
        (0, 2, {}, "worker 0 is at clock 0; 2 cannot follow"),
        (0, 1, {5: torch.zeros(3)}, "there is no key 5"),
        (0, 1, {0: torch.zeros(4)}, "key 0 has 3 elements of torch.float32"),
        (0, 1, {0: torch.zeros(3, dtype=torch.float64)}, "key 0 has 3 elements of torch.float32"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(worker, clock, gradients, message):
    store = make_store(2, math.inf)
    with pytest.raises(RefusedError, match=message):
        store.push(worker, clock, gradients, [])
    assert (store.version, set(store.clocks.values())) == (0, {0})


@pytest.mark.parametrize("staleness", [-1, 0.5, -math.inf, math.nan])
def test_a_staleness_that_is_no_number_of_pushes_is_refused(staleness):
    with pytest.raises(ValueError, match="is not a number of pushes"):
        check_staleness(staleness)
