"""The command line: `python -m lit_parallel.benchmark overhead|steps|collectives`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lit_parallel.benchmark import report
from lit_parallel.benchmark.collectives import GLOO, SIZES, time_collectives
from lit_parallel.benchmark.training import (
    BATCH_SIZES,
    DDP,
    MODELS,
    PLAIN,
    overhead_contenders,
    steps_contenders,
    time_steps,
)


def main() -> None:
    """Measures, with all contenders in turn in one run, prints tables, and writes the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m lit_parallel.benchmark", description=main.__doc__)
    parser.add_argument(
        "benchmark",
        choices=["overhead", "steps", "collectives"],
        nargs="?",
        default="overhead",
        help="overhead: a step through Lightning against a plain loop; steps: a step with every strategy; collectives:"
        " one all-reduce (default: overhead)",
    )
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=["lenet"], help="default: lenet")
    parser.add_argument("--batch-size", type=int, help="images per rank (default: by model)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a collective's tensor")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=100, help="steps per round (default: 100)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    flags = parser.parse_args()
    if min(flags.batch_size or 1, flags.ranks, flags.steps, flags.rounds) < 1 or min(flags.sizes) < 4:
        parser.error("--batch-size, --ranks, --steps and --rounds must be at least 1, and --sizes at least 4")

    print(report.describe(report.machine()))
    tables: list[dict[str, Any]] = []
    if flags.benchmark == "collectives":
        for size, seconds in time_collectives(flags.ranks, flags.sizes, flags.rounds).items():
            title = f"All-reduce of {size:,} bytes over {flags.ranks} ranks"
            tables.append({"title": title, "baseline": GLOO, "rows": report.compare(seconds, GLOO)})
    else:
        is_overhead = flags.benchmark == "overhead"
        contenders, baseline = (overhead_contenders(), PLAIN) if is_overhead else (steps_contenders(), DDP)
        for model in flags.models:
            batch_size = flags.batch_size or BATCH_SIZES[model]
            seconds = time_steps(contenders, model, batch_size, flags.ranks, steps=flags.steps, rounds=flags.rounds)
            title = f"One training step of {model}, {batch_size} images on each of {flags.ranks} ranks"
            tables.append({"title": title, "baseline": baseline, "rows": report.compare(seconds, baseline)})
    for table in tables:
        print(f"\n{report.markdown(table)}")
    if flags.json is not None:
        report.write(flags.json, flags.rounds, tables)


if __name__ == "__main__":
    main()
