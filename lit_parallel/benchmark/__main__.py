"""The command line: `python -m lit_parallel.benchmark overhead`."""

from __future__ import annotations

import argparse
from pathlib import Path

from lit_parallel.benchmark import report
from lit_parallel.benchmark.overhead import PLAIN, overhead


def main() -> None:
    """Parses the command line, measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m lit_parallel.benchmark", description=main.__doc__)
    parser.add_argument("benchmark", choices=["overhead"], nargs="?", default="overhead")
    parser.add_argument("--model", choices=["lenet", "resnet18"], default="lenet")
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank (default: 64)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="steps per round (default: 200)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    flags = parser.parse_args()
    if min(flags.batch_size, flags.ranks, flags.steps, flags.rounds) < 1:
        parser.error("--batch-size, --ranks, --steps and --rounds must be at least 1")

    settings = {
        "model": flags.model,
        "batch_size_per_rank": flags.batch_size,
        "ranks": flags.ranks,
        "steps": flags.steps,
        "rounds": flags.rounds,
    }
    rows = report.compare(
        overhead(flags.model, flags.batch_size, flags.ranks, flags.steps, flags.rounds), baseline=PLAIN
    )
    print(f"One training step of {flags.model}, {flags.batch_size} images on each of {flags.ranks} ranks, in")
    print(f"{flags.rounds} rounds of {flags.steps} steps in turn; {report.machine()}\n")
    print(report.table(rows, PLAIN))
    if flags.json is not None:
        report.write(flags.json, "overhead", settings, rows)


if __name__ == "__main__":
    main()
