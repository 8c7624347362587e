from __future__ import annotations

import os
import warnings

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_parallel import RingStrategy
from lit_parallel.testing import run_ranks
from lit_parallel.transports import links
from tests.strategies.fits import QUIET, Plain, dataset


class Choice(Plain):
    chosen = ""

    def on_train_batch_end(self, *args):
        self.chosen = type(self.trainer.strategy._gradient_sync.transport).__name__


def choose(transport, hindrance=None):
    if hindrance == "room":
        os.statvfs = lambda path: os.statvfs_result([1, 1, 0, 0, 0, 0, 0, 0, 0, 0])
    if hindrance == "host":
        gather = links._gather
        links._gather = lambda value: (
            [(b"\0nobody", token) for _, token in gather(value)] if isinstance(value, tuple) else gather(value)
        )
    module = Choice()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(**QUIET, strategy=RingStrategy(transport=transport), devices=2, max_steps=2)
        trainer.fit(module, DataLoader(dataset(), batch_size=12))
    return module.chosen, [str(each.message) for each in caught if "process group" in str(each.message)]


@pytest.mark.parametrize(
    ("transport", "hindrance", "chosen"),
    [
        ("auto", None, "SharedMemoryTransport"),
        ("shared_memory", None, "SharedMemoryTransport"),
        ("process_group", None, "ProcessGroupTransport"),
        ("auto", "room", "ProcessGroupTransport"),
        ("auto", "host", "ProcessGroupTransport"),
    ],
)
def test_the_quickest_that_works_is_chosen(transport, hindrance, chosen):
    results = run_ranks(choose, 2, transport, hindrance)
    assert [result[0] for result in results] == [chosen, chosen]
    warned = results[0][1]
    if hindrance == "room":
        assert len(warned) == 1
        assert "not shared memory: /dev/shm has 0 bytes free" in warned[0]
    else:
        assert warned == []


def refuse(hindrance):
    with pytest.raises(ValueError, match="transport='shared_memory' cannot be used: .*Use transport='auto'"):
        choose("shared_memory", hindrance)


@pytest.mark.parametrize("hindrance", ["room", "host"])
def test_what_was_asked_for_and_cannot_be_is_an_error_on_all_ranks(hindrance):
    run_ranks(refuse, 2, hindrance)


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="Unknown transport 'shm'; choose one of auto, shared_memory, process_group"):
        RingStrategy(transport="shm")
