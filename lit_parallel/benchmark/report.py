"""What a benchmark says: medians, ratios with their spread, and what it ran on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare(seconds: Mapping[str, Sequence[float]], baseline: str) -> list[dict[str, Any]]:
    """A row for each contender: its median and p90, and its ratio to the baseline round by round.

    Args:
        seconds: For each contender the seconds of each round; rounds ran in turn, A B C A B C.
        baseline: The contender that others are divided by.
    """
    rows = []
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds[baseline], strict=True)]
        rows.append(
            {
                "name": name,
                "median_ms": 1e3 * statistics.median(values),
                "p90_ms": 1e3 * quantile(values, 0.9),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return rows


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "lit_parallel")},
    }


def describe(content: Mapping[str, Any]) -> str:
    """What `machine` found, in a line."""
    versions = ", ".join(f"{name} {content[name]}" for name in ("python", "torch", "lightning", "lit_parallel"))
    return f"{content['cores']} cores of {content['processor']}, {content['system']}; {versions}"


def markdown(table: Mapping[str, Any]) -> str:
    """A table of rows as Markdown, under its title."""
    lines = [
        f"{table['title']}:",
        "",
        f"| | median | p90 | time against {table['baseline']} (spread) |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['median_ms']:.3g} ms | {row['p90_ms']:.3g} ms"
        f" | {row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f}) |"
        for row in table["rows"]
    ]
    return "\n".join(lines)


def write(path: Path, rounds: int, tables: Sequence[Mapping[str, Any]]) -> None:
    """Writes a benchmark's figures as JSON, with the machine and the command that repeats them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "lit_parallel.benchmark", *sys.argv[1:]])
    content = {"command": command, "machine": machine(), "rounds": rounds, "tables": tables}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
