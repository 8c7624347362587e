"""Every test must leave the machine as it found it."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def _children() -> set[str]:
    """The live child processes, without the servers that multiprocessing keeps for later tests."""
    children = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread, or a child, that has just ended
            children |= _live((task / "children").read_text().split())
    return children


def _live(pids: list[str]) -> set[str]:
    children = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            command = Path("/proc", pid, "cmdline").read_bytes().decode()
            if "multiprocessing.forkserver" not in command and "multiprocessing.resource_tracker" not in command:
                children.add(f"{pid}: {command}")
    return children


def _state() -> dict[str, object]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return {
        "environment variables": environment,
        "processes": _children(),
        "threads": {thread.name for thread in threading.enumerate()},
        "shared segments": set(os.listdir("/dev/shm")),
        "files in the project": {path.name for path in ROOT.iterdir() if not path.name.startswith(".")},
        "process group": torch.distributed.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "warning filters": len(warnings.filters),
    }


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    before = _state()
    yield
    after = _state()
    assert after == before


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests start more ranks than there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
