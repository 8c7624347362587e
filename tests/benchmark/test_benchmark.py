from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lit_parallel.benchmark.report import compare, markdown
from lit_parallel.schedules import available_algorithms

SMALL = Path(__file__).parents[2] / "recipes" / "data"


def test_ratios_are_taken_round_by_round():
    table = compare("A title", "base", "ms", {"base": [1.0, 2.0, 4.0], "other": [2.0, 6.0, 4.0]})
    base, other = table["rows"]
    assert base["ratio"] == 1
    assert (other["ratio"], other["ratio_min"], other["ratio_max"]) == (2, 1, 3)
    assert (other["median"], other["p90"]) == (4, 6)
    assert "| other | 4 ms | 6 ms | 2.00 (1.00-3.00) |" in markdown(table)


def measure(folder, *flags):
    path = folder / "figures.json"
    command = [sys.executable, "-m", "lit_parallel.benchmark", *flags, "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    figures = json.loads(path.read_text())
    assert figures["command"] == " ".join(["python", *command[1:]])
    assert figures["machine"]["cores"] >= 1
    for table in figures["tables"]:
        assert table["title"] in result.stdout
        assert all(row["median"] > 0 for row in table["rows"])
    assert {path.name for path in folder.iterdir()} == {"figures.json", "figures.png"}
    assert (folder / "figures.png").read_bytes().startswith(b"\x89PNG")
    return [[row["name"] for row in table["rows"]] for table in figures["tables"]]


def test_overhead(tmp_path):
    names = measure(tmp_path, "overhead", "--steps", "3", "--batch-size", "4", "--rounds", "2")
    assert names == [["plain PyTorch, DDP", "Lightning, ddp", "ring"]]


def test_steps(tmp_path):
    (names,) = measure(tmp_path, "steps", "--models", "mlp", "--steps", "2", "--batch-size", "2", "--rounds", "1")
    assert names[0] == "Lightning, ddp"
    assert names[-1] == "no synchronisation"
    assert {*available_algorithms(), "ring, overlap", "ring, process group", "ps, 1 server"} < set(names)


def test_memory(tmp_path):
    (names,) = measure(tmp_path, "memory", "--steps", "2", "--batch-size", "2", "--rounds", "1")
    assert names == ["Lightning, ddp", *available_algorithms(), "no synchronisation"]


def test_collectives(tmp_path):
    names = measure(tmp_path, "collectives", "--sizes", "4", "4096", "--rounds", "2")
    assert len(names) == 2
    assert {"gloo's all_reduce", "floor: one memory copy", "ring, shared memory", "ring, process group"} <= set(
        names[0]
    )


def test_parameter_server(tmp_path):
    times, counts = measure(tmp_path, "parameter_server", "--sizes", "4000000", "--rounds", "2")
    assert {"raw ZeroMQ, there and back", "push and pull by message", "torch RPC, there and back"} < set(times)
    assert counts == ["1 server", "2 servers", "4 servers"]
    ratios = [row["ratio"] for row in json.loads((tmp_path / "figures.json").read_text())["tables"][1]["rows"]]
    assert ratios == pytest.approx([1, 1 / 2, 1 / 4], rel=0.01)  # headers are small


def test_epoch(tmp_path):
    """Also that the recipe's model can be compiled."""
    flags = ("--steps", "2", "--batch-size", "16", "--rounds", "1", "--data-dir", str(SMALL))
    (names,) = measure(tmp_path, "epoch", *flags)
    assert names[0] == "tutorial's loop, one process"
    assert {"ring", "ring, compiled", "ring, bf16-mixed, channels last"} < set(names)
