from __future__ import annotations

import re

from tests.scripts import ROOT, run


def test_the_slow_worker_holds_up_only_those_in_step(tmp_path):
    flags = ("--devices", 2, "--slowdown", 20, "--seconds", 4, "--strategies", "ring", "ps_async")
    recipe, data = ROOT / "recipes" / "stragglers.py", ROOT / "recipes" / "data"
    result = run(recipe, tmp_path, *flags, "--data-dir", data, warnings="default")
    assert result.returncode == 0, result.stderr
    line = r"(\w+): test acc (0\.\d{3}), (\d+) samples/sec, staleness (\d+\.\d) on average, at most (\d+)"
    found = {match[1]: [float(each) for each in match.groups()[1:]] for match in re.finditer(line, result.stdout)}
    assert found["ring"][2:] == [0, 0]
    assert found["ps_async"][1] > found["ring"][1]
    assert found["ps_async"][3] > 4
    assert (tmp_path / "output" / "stragglers.png").stat().st_size > 10_000
