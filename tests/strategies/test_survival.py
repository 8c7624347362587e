"""Training goes on without a worker that was killed, takes it in again, and outlives a server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("surviving.py")
#: Mean of the squares of the ranks that live: the torchmetrics metric of the script.
ALL, WITHOUT_RANK_1 = 5 / 3, 2.0


def run(folder, what, staleness, servers=2):
    folders = set(Path(tempfile.gettempdir()).glob("lit_parallel-*"))
    command = [sys.executable, SCRIPT, folder, what, str(staleness), str(servers)]
    with open(folder / "log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=120).returncode
        # Orphans of a first rank that was killed, and a rank that came back.
        deadline = time.monotonic() + 30
        while subprocess.run(["pgrep", "-f", str(folder)], capture_output=True).returncode == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert set(Path(tempfile.gettempdir()).glob("lit_parallel-*")) == folders  # nothing is left behind
    ends = {int(path.stem.removeprefix("rank ")): torch.load(path) for path in folder.glob("rank *.pt")}
    return code, ends, (folder / "log").read_text()


def assert_same_at_every_validation(ends):
    """All ranks that saw a validation saw the same weights and the same metric."""
    seen = {}
    for end in ends.values():
        for epoch, metric, weights in end["seen"]:
            assert metric == seen.setdefault(epoch, (metric, weights))[0]
            assert torch.equal(weights, seen[epoch][1])
    return [seen[epoch][0] for epoch in sorted(seen)]


def test_a_killed_worker_is_evicted_and_the_rest_finish(tmp_path):
    """Its server, a thread of its own, is replaced by a process."""
    code, ends, log = run(tmp_path, "worker", "inf", servers=0)
    assert code == 0, log
    assert ends.keys() == {0, 2}
    assert {end["members"] for end in ends.values()} == {2}
    assert {end["steps"] for end in ends.values()} == {50}
    metrics = assert_same_at_every_validation(ends)
    assert metrics == pytest.approx([ALL] + [WITHOUT_RANK_1] * 4)
    assert "worker 1 has not been heard for 5 seconds; the others go on without it" in log
    assert "Rank 1 has not been heard for" in log
    assert "Server 1 has ended; it is started again from its snapshot" in log


def test_a_worker_that_comes_back_is_taken_in(tmp_path):
    code, ends, log = run(tmp_path, "comeback", 4)
    assert code == 0, log
    assert ends.keys() == {0, 1, 2}
    assert {end["members"] for end in ends.values()} == {3}
    assert {end["steps"] for end in ends.values()} == {50}  # its own as though it had never been away
    assert max(end["staleness"] for end in ends.values()) <= 4
    metrics = assert_same_at_every_validation(ends)
    assert metrics[0] == metrics[-1] == pytest.approx(ALL)
    assert [epoch for epoch, *_ in ends[1]["seen"]] == list(range(5 - len(ends[1]["seen"]), 5))
    assert "Rank 1 is back" in log
    torch.load(next(tmp_path.glob("*.ckpt")))  # which the first rank saved at the end


def test_a_killed_server_is_started_again_and_training_goes_on(tmp_path):
    code, ends, log = run(tmp_path, "server", "inf")
    assert code == 0, log
    assert ends.keys() == {0, 1, 2}
    assert assert_same_at_every_validation(ends) == pytest.approx([ALL] * 5)
    assert "Server 1 has ended; it is started again from its snapshot" in log
    assert log.count("has been started again; going on with it") == 3
    assert "refused" not in log


def test_without_the_first_rank_all_end(tmp_path):
    start = time.monotonic()
    code, ends, log = run(tmp_path, "first", 4)
    assert code == -9
    assert not ends
    assert time.monotonic() - start < 60
    for rank in (1, 2):
        assert f"Rank {rank} lost contact with rank 0" in log
