from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lit_parallel.benchmark.report import compare, table


def test_ratios_are_taken_round_by_round():
    rows = compare({"base": [1.0, 2.0, 4.0], "other": [2.0, 6.0, 4.0]}, baseline="base")
    assert rows[0]["ratio"] == 1
    assert (rows[1]["ratio"], rows[1]["ratio_min"], rows[1]["ratio_max"]) == (2, 1, 3)
    assert rows[1]["median_ms"] == pytest.approx(4000)
    assert "| other | 4000.00 ms | 6000.00 ms | 2.00 (1.00-3.00) |" in table(rows, "base")


def test_the_command_measures_and_writes_its_figures(tmp_path):
    flags = ["overhead", "--steps", "5", "--rounds", "2", "--batch-size", "4", "--json", str(tmp_path / "figures.json")]
    result = subprocess.run(
        [sys.executable, "-m", "lit_parallel.benchmark", *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["name"] for row in figures["rows"]] == ["plain PyTorch, DDP", "Lightning, ddp", "Lightning, ring"]
    assert all(row["median_ms"] > 0 for row in figures["rows"])
    assert figures["command"].startswith("python -m lit_parallel.benchmark overhead --steps 5")
    assert figures["machine"]["cores"] >= 1
    assert result.stdout.count("\n|") >= 5
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]
