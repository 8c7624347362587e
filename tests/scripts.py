"""Scripts run as programs: in a process of their own, or quicker in one that has imported Lightning already."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from lit_parallel.testing import run_ranks
from lit_parallel.testing.ranks import preloaded_context

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def run(script, folder, *flags, warnings="error::UserWarning", timeout=240):
    """On the real command line, where Lightning starts the other ranks."""
    result = subprocess.run(
        [sys.executable, "-W", warnings, script, *map(str, flags)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Result(result.returncode, result.stdout, result.stderr)


def run_in_child(script, folder, *flags, warnings="error"):
    """In one process that was forked after Lightning was imported."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = preloaded_context().Process(target=_send, args=(sender, script, folder, flags, warnings))
    process.start()
    sender.close()
    with receiver:
        result = receiver.recv()
    process.join()
    process.close()
    return result


def run_in_ranks(world_size, script, folder, *flags):
    """In ranks that a cluster has started; what the first one ends with."""
    return run_ranks(_run, world_size, script, folder, flags, "error")[0]


def _send(sender, *arguments):
    sender.send(_run(*arguments))


def _run(script, folder, flags, action):
    os.chdir(folder)
    sys.argv = [str(script), *map(str, flags)]
    sys.path.insert(0, str(Path(script).parent))
    warnings.simplefilter(action, UserWarning)
    code = 0
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
    return Result(code or 0, stdout.getvalue(), stderr.getvalue())
