"""The command line: `python -m lit_parallel.benchmark --help`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_utilities.core.imports import RequirementCache

from lit_parallel.benchmark import report
from lit_parallel.benchmark.collectives import GLOO, SIZES, time_collectives
from lit_parallel.benchmark.epoch import TUTORIAL, time_epochs
from lit_parallel.benchmark.parameter_server import ONE_SERVER, RAW, count_bytes, time_push_pull
from lit_parallel.benchmark.peers import mpi_place
from lit_parallel.benchmark.training import (
    BATCH_SIZES,
    DDP,
    MODELS,
    PLAIN,
    measure_memory,
    memory_contenders,
    overhead_contenders,
    steps_contenders,
    time_steps,
)

_BENCHMARKS = {
    "overhead": "a step through Lightning against a plain loop",
    "steps": "a step with every strategy",
    "memory": "what a rank holds at most with every strategy",
    "collectives": "one all-reduce (under mpiexec also MPI's)",
    "parameter_server": "a push and a pull, against ZeroMQ, torch RPC and all-reduces",
    "epoch": "an epoch on Fashion-MNIST against a tutorial's loop, with every flag that makes it faster",
}
_EPOCH_BATCH_SIZE = 128


def main() -> None:
    """Measures, with all contenders in turn in one run, prints tables, and writes the figures as JSON and PNG."""
    parser = argparse.ArgumentParser(prog="python -m lit_parallel.benchmark", description=main.__doc__)
    parser.add_argument(
        "benchmark",
        choices=list(_BENCHMARKS),
        nargs="?",
        default="overhead",
        help="; ".join(f"{name}: {text}" for name, text in _BENCHMARKS.items()) + " (default: overhead)",
    )
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=["lenet"], help="default: lenet")
    parser.add_argument(
        "--batch-size",
        type=int,
        help=f"images per rank (default: by model); of all ranks in epoch ({_EPOCH_BATCH_SIZE})",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a collective's tensor")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2; mpiexec's)")
    parser.add_argument("--steps", type=int, help="steps per round (default: 100; the whole set in epoch)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST (default: searched, then downloaded)")
    parser.add_argument("--json", type=Path, help="where to write the figures; a picture is drawn beside it")
    flags = parser.parse_args()
    if min(flags.batch_size or 1, flags.ranks, flags.steps or 1, flags.rounds) < 1 or min(flags.sizes) < 4:
        parser.error("--batch-size, --ranks, --steps and --rounds must be at least 1, and --sizes at least 4")
    if flags.benchmark == "epoch" and "mlp" in flags.models:
        parser.error("epoch trains the recipe's models: --models lenet resnet18")
    place, command = mpi_place(), ["python", "-m", "lit_parallel.benchmark", *sys.argv[1:]]
    if place is not None:
        if flags.benchmark != "collectives":
            parser.error("only collectives runs under mpiexec")
        flags.ranks = place[1]
        command = ["mpiexec", "-n", str(flags.ranks), *command]
    if flags.json is not None and not (matplotlib := RequirementCache("matplotlib")):
        parser.error(f"--json draws with matplotlib: pip install 'lit_parallel[recipes]'. {matplotlib}")

    is_first = place is None or place[0] == 0
    if is_first:
        print(report.describe(report.machine()))
    tables = []
    for table in _measure(flags):
        tables.append(table)
        if is_first:
            print(f"\n{report.markdown(table)}", flush=True)
    if flags.json is not None and is_first:
        report.write(flags.json, shlex.join(command), flags.rounds, tables)


def _measure(flags: argparse.Namespace) -> Iterator[report.Table]:
    ranks, rounds = flags.ranks, flags.rounds
    if flags.benchmark == "collectives":
        for size, seconds in time_collectives(ranks, flags.sizes, rounds).items():
            title = f"All-reduce of {size:,} bytes over {ranks} ranks"
            yield report.compare(title, GLOO, "ms", report.milliseconds(seconds))
        return
    if flags.benchmark == "parameter_server":
        for size in flags.sizes:
            title = f"Push and pull of {size:,} bytes between one worker and one server"
            yield report.compare(title, RAW, "ms", report.milliseconds(time_push_pull(size, rounds)))
            title = f"What the busiest server receives of a push of {size:,} bytes, counted"
            yield report.compare(title, ONE_SERVER, "MB", count_bytes(size))
        return
    for model in flags.models:
        if flags.benchmark == "epoch":
            batch_size = flags.batch_size or _EPOCH_BATCH_SIZE
            epoch = time_epochs(
                model, batch_size, ranks, num_batches=flags.steps, rounds=rounds, data_dir=flags.data_dir
            )
            what = "An epoch" if flags.steps is None else f"{flags.steps} batches"
            yield report.compare(f"{what} of {model}, {batch_size} images a batch, {ranks} ranks", TUTORIAL, "s", epoch)
            continue
        batch_size = flags.batch_size or BATCH_SIZES[model]
        steps = flags.steps or 100
        of_model = f"{model}, {batch_size} images on each of {ranks} ranks"
        if flags.benchmark == "memory":
            megabytes = measure_memory(memory_contenders(), model, batch_size, ranks, steps=steps, rounds=rounds)
            yield report.compare(f"Peak memory of a rank that trains {of_model}", DDP, "MB", megabytes)
            continue
        is_overhead = flags.benchmark == "overhead"
        contenders, baseline = (overhead_contenders(), PLAIN) if is_overhead else (steps_contenders(), DDP)
        seconds = time_steps(contenders, model, batch_size, ranks, steps=steps, rounds=rounds)
        yield report.compare(f"One training step of {of_model}", baseline, "ms", report.milliseconds(seconds))


if __name__ == "__main__":
    main()
