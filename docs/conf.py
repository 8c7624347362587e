"""Sphinx configuration. The table of algorithms is made from the registry and the costs of the schedules."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import lit_parallel
from lit_parallel.benchmark import report
from lit_parallel.schedules import available_algorithms, cost, get_algorithm

project = "lit_parallel"
author = "The lit_parallel developers"
copyright = "2026, the lit_parallel developers"
version = release = lit_parallel.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "lit_parallel"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
nitpicky = False

RANKS = 8
MEGABYTE = 1_000_000


def algorithm_table() -> str:
    """What one all-reduce of 1 MB costs with each algorithm."""
    lines = [
        "| `strategy=` | schedule | steps | messages, busiest rank | MB, busiest rank | MB one after the other |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in available_algorithms():
        algorithm = get_algorithm(name)
        total = cost(algorithm.make_schedule(RANKS), MEGABYTE)
        schedule = algorithm.make_schedule.__name__
        lines.append(
            f"| `{name}` | {{py:func}}`{schedule} <lit_parallel.schedules.{schedule}>`"
            f" | {total.num_steps} | {total.busiest_messages}"
            f" | {total.busiest_bytes / MEGABYTE:.2f} | {total.critical_bytes / MEGABYTE:.2f} |"
        )
    return "\n".join(lines) + "\n"


def algorithm_summaries() -> str:
    """The first paragraph of each algorithm's module."""
    paragraphs = []
    for name in available_algorithms():
        module = inspect.getmodule(get_algorithm(name).make_schedule)
        paragraphs.append(f"**`{name}`**: {(inspect.getdoc(module) or '').strip()}")
    return "\n\n".join(paragraphs) + "\n"


def benchmark_tables(path: Path) -> str:
    """The tables of a benchmark's JSON file, with the machine and the command."""
    figures = json.loads(path.read_text())
    picture = generated / f"{path.stem}.png"
    report.draw(picture, figures["tables"])
    tables = "\n\n".join(report.markdown(table) for table in figures["tables"])
    measured = f"Measured on {report.describe(figures['machine'])}:\n\n```bash\n{figures['command']}\n```\n"
    return f"![The ratios as bars](_generated/{picture.name})\n\n{tables}\n\n{measured}"


generated = Path(__file__).parent / "_generated"
generated.mkdir(exist_ok=True)
(generated / "algorithm_table.md").write_text(algorithm_table())
(generated / "algorithm_summaries.md").write_text(algorithm_summaries())
for figures in Path(__file__).parent.glob("figures/*.json"):
    (generated / f"{figures.stem}.md").write_text(benchmark_tables(figures))
