from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lit_parallel
from lit_parallel.schedules import ScheduleError, available_algorithms, reduce_to_root, ring
from lit_parallel.strategies import PUSH_PULL_STALENESS
from lit_parallel.strategies.synchronous import SynchronousStrategy
from tests.scripts import run, run_in_child
from tests.strategies.fits import QUIET

VARIANTS = [
    (f"{start}{unused}", method, bool(unused))
    for start, method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork"))
    for unused in ("", "_find_unused_parameters_true")
]


@pytest.mark.parametrize("name", available_algorithms())
@pytest.mark.parametrize(("suffix", "start_method", "unused"), VARIANTS)
def test_every_algorithm_has_the_variants_of_ddp(name, suffix, start_method, unused):
    strategy = Trainer(**QUIET, strategy=f"{name}{suffix}", devices=2).strategy
    assert isinstance(strategy, SynchronousStrategy)
    assert strategy.algorithm == name
    assert strategy._start_method == start_method
    assert strategy._ddp_kwargs["find_unused_parameters"] is unused


def test_classes_take_the_place_of_names():
    for strategy, name in (
        (lit_parallel.AllReduceStrategy(), "allreduce"),
        (lit_parallel.RingStrategy(overlap=True, bucket_cap_mb=5), "ring"),
        (lit_parallel.DoubleRingStrategy(), "double_ring"),
        (lit_parallel.TreeStrategy(), "tree"),
        (lit_parallel.HalvingDoublingStrategy(), "halving_doubling"),
        (lit_parallel.ParameterServerStrategy(), "ps"),
    ):
        assert Trainer(**QUIET, strategy=strategy, devices=2).strategy.algorithm == name
        assert type(StrategyRegistry.get(name)) is type(strategy)


def test_single_is_one_device():
    trainer = Trainer(**QUIET, strategy="single", devices=1)
    assert (trainer.world_size, trainer.num_devices) == (1, 1)
    with pytest.raises(ValueError, match="trains on one device, but devices=2. Set devices=1"):
        Trainer(**QUIET, strategy="single", devices=2)
    with pytest.raises(ValueError, match="num_nodes=2"):
        Trainer(**QUIET, strategy="single", devices=1, num_nodes=2)


def test_import_alone_registers_and_leaves_lightnings_own_names():
    code = (
        "from lightning.pytorch.strategies import StrategyRegistry as r; before = dict(r); import lit_parallel;"
        "assert all(r[name] == before[name] for name in before); print(len(r) - len(before))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) == 2 + 8 * len(available_algorithms()) + 4 * len(PUSH_PULL_STALENESS)


@pytest.mark.parametrize("suffix", ["", "_spawn", "_fork", "_notebook"])
def test_workers_at_their_own_pace_have_names_too(suffix):
    for name, staleness in (("ps_async", math.inf), ("ps_ssp", 4)):
        strategy = StrategyRegistry.get(f"{name}{suffix}")
        assert isinstance(strategy, lit_parallel.PushPullStrategy)
        assert strategy.staleness == staleness
        assert strategy._start_method == {"": "popen", "_notebook": "fork"}.get(suffix, suffix[1:])


@pytest.mark.parametrize(
    ("name", "schedule", "error", "message"),
    [
        ("ring", ring, ValueError, "already has a strategy named 'ring'"),
        ("fsdp", ring, ValueError, "already has a strategy named 'fsdp'"),
        ("My-Ring", ring, ValueError, "lower-case identifier"),
        ("to_root", reduce_to_root, ScheduleError, "ends without the contributions"),
    ],
)
def test_wrong_registrations_are_refused(name, schedule, error, message):
    with pytest.raises(error, match=message):
        lit_parallel.register_algorithm(name, schedule)
    assert name in StrategyRegistry or name not in available_algorithms()


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
sys.path.insert(0, {root!r})
import star
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from tests.strategies.fits import QUIET, Plain, dataset

if __name__ == "__main__":
    for strategy in sys.argv[1:]:
        torch.manual_seed(1)
        module = Plain()
        trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=1)
        trainer.fit(module, DataLoader(dataset(), batch_size=12))
        if trainer.is_global_zero:
            print(strategy, sum(p.double().sum().item() for p in module.parameters()))
"""

STAR = '''"""The last rank collects and hands the sum down the line."""
import lit_parallel
from lit_parallel.schedules import Schedule, Send


def star(world_size):
    last = world_size - 1
    collect = tuple(Send(rank, last, 0, reduce=True) for rank in range(last))
    hand_down = [(Send(rank, rank - 1, 0, reduce=False),) for rank in range(last, 0, -1)]
    return Schedule("star", world_size, 1, lambda: iter([collect, *hand_down]))


lit_parallel.register_algorithm("star", star)
'''


def test_a_new_algorithm_is_one_short_file_and_one_call(tmp_path):
    assert len(STAR.splitlines()) < 40
    (tmp_path / "star.py").write_text(STAR)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), root=str(Path(__file__).parents[2])))
    sums = []
    # Of spawned ranks the first one, which prints, is a process of its own.
    for strategy, runner in (("star", run_in_child), ("star_spawn", run), ("ddp", run_in_child)):
        result = runner(script, tmp_path, strategy, warnings="default")
        assert result.returncode == 0, result.stderr
        name, value = result.stdout.split()[-2:]
        assert name == strategy
        sums.append(value)
    assert sums[0] == sums[1] == sums[2]
