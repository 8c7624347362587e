from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from lit_parallel.models import lenet
from lit_parallel.schedules import get_algorithm
from recipes.from_scratch import evaluate, get_params, train_batch
from tests.scripts import ROOT, run_in_child

RECIPE = ROOT / "recipes" / "from_scratch.py"
CPUS = [torch.device("cpu")] * 3


@pytest.mark.parametrize("algorithm", ["allreduce", "ring"])
def test_a_step_on_many_devices_is_a_step_of_sgd_on_the_whole_batch(algorithm):
    torch.manual_seed(0)
    net, images, labels = lenet().double(), torch.rand(8, 1, 28, 28).double(), torch.randint(10, (8,))
    device_params = [get_params(dict(net.named_parameters()), device) for device in CPUS]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        train_batch(net, images, labels, device_params, CPUS, get_algorithm(algorithm).make_schedule(3), lr=0.1)
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()
    for params in device_params:
        for name, param in net.named_parameters():
            torch.testing.assert_close(params[name], param, rtol=1e-10, atol=1e-12)
    accuracy = evaluate(net, [(images, labels)], device_params, CPUS)
    assert accuracy == pytest.approx((net(images).argmax(1) == labels).double().mean().item())


def test_the_lesson_runs_and_learns(tmp_path):
    flags = (
        "--data-dir",
        ROOT / "recipes" / "data",
        "--epochs",
        1,
        "--batch-size",
        32,
        "--lr",
        0.1,
        "--algorithm",
        "ring",
    )
    result = run_in_child(RECIPE, tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    accuracies = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert accuracies[-1] > 0.5
    assert "sec/epoch with ring on cpu, cpu" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--devices 0", "must be at least 1"),
        ("--algorithm rign", "invalid choice: 'rign'"),
        ("--batch-size 1", "--batch-size 1 is smaller than the number of devices"),
        ("--data-dir missing", "data_dir='missing'"),
    ],
)
def test_wrong_flags(tmp_path, flags, message):
    result = run_in_child(RECIPE, tmp_path, *flags.split())
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
