"""What a benchmark says: medians, ratios with their spread, and what it ran on."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Table = dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare(title: str, baseline: str, unit: str, values: Mapping[str, Sequence[float]]) -> Table:
    """A table with a row for each contender: its median and p90, and its ratio to the baseline round by round.

    Args:
        title: What was measured.
        baseline: The contender that others are divided by.
        unit: Of the values.
        values: For each contender the value of each round; rounds ran in turn, A B C A B C.
    """
    rows = []
    for name, own in values.items():
        ratios = [value / base for value, base in zip(own, values[baseline], strict=True)]
        rows.append(
            {
                "name": name,
                "median": statistics.median(own),
                "p90": quantile(own, 0.9),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
    return {"title": title, "baseline": baseline, "unit": unit, "rows": rows}


def milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The same in milliseconds."""
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


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


def markdown(table: Table) -> str:
    """A table as Markdown, under its title."""
    unit = table["unit"]
    lines = [
        f"{table['title']}:",
        "",
        f"| | median | p90 | ratio to {table['baseline']} (spread) |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['median']:.3g} {unit} | {row['p90']:.3g} {unit}"
        f" | {row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f}) |"
        for row in table["rows"]
    ]
    return "\n".join(lines)


def draw(path: Path, tables: Sequence[Table]) -> None:
    """Draws the ratios of each table as bars, with their spread.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional, and slow to import)

    heights = [1 + 0.22 * len(table["rows"]) for table in tables]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(tables), squeeze=False, height_ratios=heights)[:, 0]
    for axes, table in zip(panels, tables, strict=True):
        rows = table["rows"][::-1]  # the first at the top
        ratios = [row["ratio"] for row in rows]
        spread = [[row["ratio"] - row["ratio_min"] for row in rows], [row["ratio_max"] - row["ratio"] for row in rows]]
        axes.barh([row["name"] for row in rows], ratios, xerr=spread, ecolor="0.4", capsize=2)
        axes.axvline(1, color="0.2", linewidth=0.8)
        axes.set_title(table["title"], loc="left", fontsize="medium")
        axes.set(xlabel=f"ratio to {table['baseline']}", xlim=(0, 1.2 * max(1, *ratios)))
    figure.savefig(path, dpi=120)


def write(path: Path, command: str, rounds: int, tables: Sequence[Table]) -> None:
    """Writes a benchmark's figures as JSON, with the machine and the command that repeats them, and a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "machine": machine(), "rounds": rounds, "tables": tables}
    path.write_text(json.dumps(content, indent=2) + "\n")
    draw(path.with_suffix(".png"), tables)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
