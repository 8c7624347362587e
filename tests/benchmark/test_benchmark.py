from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lit_parallel.benchmark.report import compare, markdown
from lit_parallel.schedules import available_algorithms


def test_ratios_are_taken_round_by_round():
    rows = compare({"base": [1.0, 2.0, 4.0], "other": [2.0, 6.0, 4.0]}, baseline="base")
    assert rows[0]["ratio"] == 1
    assert (rows[1]["ratio"], rows[1]["ratio_min"], rows[1]["ratio_max"]) == (2, 1, 3)
    assert rows[1]["median_ms"] == pytest.approx(4000)
    text = markdown({"title": "A title", "baseline": "base", "rows": rows})
    assert "| other | 4e+03 ms | 6e+03 ms | 2.00 (1.00-3.00) |" in text


def measure(folder, *flags):
    path = folder / "figures.json"
    command = [sys.executable, "-m", "lit_parallel.benchmark", *flags, "--rounds", "2", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    figures = json.loads(path.read_text())
    assert figures["command"] == " ".join(["python", *command[1:]])
    assert figures["machine"]["cores"] >= 1
    for table in figures["tables"]:
        assert table["title"] in result.stdout
        assert all(row["median_ms"] > 0 for row in table["rows"])
    assert [path.name for path in folder.iterdir()] == ["figures.json"]
    return [[row["name"] for row in table["rows"]] for table in figures["tables"]]


def test_overhead(tmp_path):
    names = measure(tmp_path, "overhead", "--steps", "3", "--batch-size", "4")
    assert names == [["plain PyTorch, DDP", "Lightning, ddp", "ring"]]


def test_steps(tmp_path):
    (names,) = measure(tmp_path, "steps", "--models", "mlp", "--steps", "2", "--batch-size", "2")
    assert names[0] == "Lightning, ddp"
    assert names[-1] == "no synchronisation"
    assert {*available_algorithms(), "ring, overlap", "ring, process group"} < set(names)


def test_collectives(tmp_path):
    names = measure(tmp_path, "collectives", "--sizes", "4", "4096")
    assert len(names) == 2
    assert {"gloo's all_reduce", "floor: one memory copy", "ring, shared memory", "ring, process group"} <= set(
        names[0]
    )
