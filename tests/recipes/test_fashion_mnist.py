"""The real command line, on real images."""

from __future__ import annotations

import csv
import re

import pytest
import torch

from lit_parallel.schedules import available_algorithms
from tests.scripts import ROOT, run, run_in_child, run_in_ranks

RECIPE = ROOT / "recipes" / "fashion_mnist.py"
SMALL = ROOT / "recipes" / "data"
ON_CPU = ("--accelerator", "cpu", "--data-dir", SMALL)
STRATEGIES = ("single", "dp", "ddp", *available_algorithms(), "ps_async", "ps_ssp")


def summary_of(result):
    """Accuracy, strategy and number of devices of the last line."""
    assert result.returncode == 0, result.stderr
    line = result.stdout.splitlines()[-1]
    match = re.fullmatch(r"test acc: (0\.\d{3}), \d+\.\d sec/epoch, \d+\.\d samples/sec with (\w+) on (\d) x cpu", line)
    assert match, result.stdout
    return float(match[1]), match[2], int(match[3])


def train(folder, *flags, **options):
    return summary_of(run(RECIPE, folder, *ON_CPU, *flags, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_one_flag(tmp_path, strategy):
    devices = 1 if strategy == "single" else 2
    flags = ("--strategy", strategy, "--devices", devices, "--epochs", 1, "--limit-train-batches", 30)
    if strategy in ("single", "dp"):
        result = run_in_child(RECIPE, tmp_path, *ON_CPU, *flags)
    else:
        result = run_in_ranks(devices, RECIPE, tmp_path, *ON_CPU, *flags)
    accuracy, name, count = summary_of(result)
    assert (name, count) == (strategy, devices)
    assert accuracy > 0.3  # ten classes; 30 steps

    folder = tmp_path / "output" / "version_0"
    assert (folder / "learning_curve.png").stat().st_size > 10_000
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["test_acc"]) == pytest.approx(accuracy, abs=5e-4)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 30


def test_servers_of_their_own(tmp_path):
    flags = ("--strategy", "ps_ssp", "--servers", 2, "--staleness", 1, "--epochs", 1, "--limit-train-batches", 30)
    accuracy, *_ = train(tmp_path, *flags)
    assert accuracy > 0.3
    with open(tmp_path / "output" / "version_0" / "metrics.csv") as file:
        values = {key: float(value) for row in csv.DictReader(file) for key, value in row.items() if value}
    assert 0 <= values["staleness_mean"] <= values["staleness_max"] <= 1
    assert values["versions_per_second"] > 0
    assert values["pull_seconds"] > 0


def test_training_learns_and_goes_on_from_a_checkpoint(tmp_path):
    accuracy, *_ = train(tmp_path, "--epochs", 2, "--batch-size", 64)
    assert accuracy > 0.7
    checkpoint = tmp_path / "output" / "version_0" / "checkpoints" / "last.ckpt"
    # Lightning warns that the new checkpoint goes into a new folder.
    flags = ("--strategy", "ps", "--epochs", 3, "--batch-size", 64, "--ckpt-path", checkpoint)
    train(tmp_path, *flags, warnings="default")
    again = tmp_path / "output" / "version_1" / "checkpoints" / "last.ckpt"
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (checkpoint, again)]
    assert steps == [2 * 157, 3 * 157]


def test_flags_from_a_file_and_linear_scaling(tmp_path):
    (tmp_path / "flags.yaml").write_text(
        "strategy: tree\nepochs: 1\nlimit_train_batches: 10\nlinear_scaling: true\nbatch_size: 32\nlr: 0.05\n"
    )
    summary_of(run_in_ranks(2, RECIPE, tmp_path, *ON_CPU, "--config", "flags.yaml", "--output-dir", "elsewhere"))
    saved = torch.load(tmp_path / "elsewhere" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["lr_scale"] == 2
    assert saved["hyper_parameters"]["warmup_epochs"] == 1


def test_accumulation_and_the_fastest_flags(tmp_path):
    fastest = ("--accumulate-grad-batches", 2, "--precision", "bf16-mixed", "--channels-last")
    summary_of(run_in_ranks(2, RECIPE, tmp_path, *ON_CPU, *fastest, "--epochs", 1, "--limit-train-batches", 30))
    saved = torch.load(tmp_path / "output" / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 15


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--strategy rign", "--strategy: Expected .*'ring'.* Got value: rign"),
        ("--devices 0", "--devices: .*0 does not conform to restriction v>0"),
        ("--epochs 1.5", "--epochs: .*1.5"),
        ("--lr -1", "--lr: .*-1 does not conform"),
        ("--batch-size 1", "--batch-size 1 is smaller than the number of devices .2.: .* Use --batch-size 2"),
        ("--data-dir missing", "data_dir='missing' does not hold Fashion-MNIST's four files"),
        ("--ckpt-path missing", "--ckpt-path missing: there is no such file"),
        ("--strategy single", "strategy='single' trains on one device, but devices=2"),
        ("--strategy dp --num-nodes 2", "num_nodes=2. Use a strategy with a process per device"),
        ("--output-dir file", "File exists: 'file'"),
        ("--config missing.yaml", "--config: .*missing.yaml"),
        ("--servers 2", "--servers 2 needs a parameter server: --strategy ps, ps_async or ps_ssp"),
        ("--strategy ps --staleness 2", "--staleness 2 needs --strategy ps_ssp"),
        ("--steps 3", "unrecognized arguments: --steps 3"),
    ],
)
def test_wrong_flags_end_with_one_line_and_code_2(tmp_path, flags, message):
    (tmp_path / "file").touch()
    result = run_in_child(RECIPE, tmp_path, "--accelerator", "cpu", *flags.split())
    assert result.returncode == 2
    assert re.fullmatch(f"fashion_mnist.py: error: .*{message}.*\n", result.stderr), result.stderr
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "output"] == ["file"]


def test_help_shows_commands_and_every_flag(tmp_path):
    result = run_in_child(RECIPE, tmp_path, "--help")
    assert result.returncode == 0
    assert "\n    python recipes/fashion_mnist.py --strategy ring --devices 2\n" in result.stdout
    for flag in (
        *("strategy", "devices", "num-nodes", "accelerator", "precision", "model", "batch-size", "lr", "epochs"),
        *("linear-scaling", "warmup-epochs", "accumulate-grad-batches", "compile", "data-dir"),
        *("limit-train-batches", "seed", "output-dir", "ckpt-path", "config"),
    ):
        assert f"--{flag}" in result.stdout
