"""Data-parallel training from scratch, without Lightning: every part of one step can be read here.

    python recipes/from_scratch.py --devices 2
    python recipes/from_scratch.py --devices 4 --algorithm ring

Follows "Training on Multiple GPUs" of Dive into Deep Learning (section 13.5): the parameters are copied to k devices,
each batch is split, every device runs forward and backward on its part, the gradients are summed over the devices,
and every device updates its own copy. On a machine without k GPUs the devices are k copies on the CPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lit_parallel.data import FashionMNISTDataModule
from lit_parallel.models import lenet
from lit_parallel.schedules import Schedule, available_algorithms, get_algorithm
from lit_parallel.transports import InMemoryTransport

Parameters = dict[str, Tensor]


def get_params(params: Parameters, device: torch.device) -> Parameters:
    """A copy of the parameters on a device, with gradients of its own."""
    return {name: param.detach().to(device, copy=True).requires_grad_() for name, param in params.items()}


def split_batch(images: Tensor, labels: Tensor, devices: list[torch.device]) -> list[tuple[Tensor, Tensor]]:
    """Each device's part of a batch, near-equal in size."""
    parts = zip(images.tensor_split(len(devices)), labels.tensor_split(len(devices)), strict=True)
    return [(x.to(device), y.to(device)) for (x, y), device in zip(parts, devices, strict=True)]


def all_reduce(tensors: list[Tensor], schedule: Schedule) -> None:
    """Every tensor of the list becomes the sum of all of them, by the messages of the schedule."""
    InMemoryTransport(len(tensors)).run(schedule, *(tensor.view(-1) for tensor in tensors))


def train_batch(
    net: torch.nn.Module,
    images: Tensor,
    labels: Tensor,
    device_params: list[Parameters],
    devices: list[torch.device],
    schedule: Schedule,
    lr: float,
) -> None:
    """One optimizer step on all devices."""
    parts = split_batch(images, labels, devices)
    # Losses are summed on each device, and divided by the whole batch in the update: unequal parts need no weights.
    losses = [
        cross_entropy(functional_call(net, params, (x,)), y, reduction="sum")
        for params, (x, y) in zip(device_params, parts, strict=True)
    ]
    for loss in losses:  # backward runs on each device by itself
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name in device_params[0]:
            all_reduce([params[name].grad for params in device_params], schedule)  # type: ignore[misc]
        for params in device_params:
            sgd(params, lr, batch_size=len(images))


def sgd(params: Parameters, lr: float, batch_size: int) -> None:
    """Mini-batch stochastic gradient descent on one device's copy."""
    for param in params.values():
        assert param.grad is not None
        param -= lr * param.grad / batch_size  # noqa: PLW2901  (in place)
        param.grad.zero_()


@torch.no_grad()
def evaluate(
    net: torch.nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    device_params: list[Parameters],
    devices: list[torch.device],
) -> float:
    """Accuracy, with the correct answers counted on every device and added up."""
    correct = total = 0
    for images, labels in batches:
        for params, (x, y) in zip(device_params, split_batch(images, labels, devices), strict=True):
            correct += int((functional_call(net, params, (x,)).argmax(dim=1) == y).sum())
        total += len(labels)
    return correct / total


def train(num_devices: int, batch_size: int, lr: float, epochs: int, algorithm: str, data_dir: Path | None) -> float:
    """Trains LeNet and returns its accuracy on the test images."""
    torch.manual_seed(0)
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", i) if gpus >= num_devices else torch.device("cpu") for i in range(num_devices)]
    data = FashionMNISTDataModule(batch_size, data_dir, fallback_dir=Path(__file__).parent / "data")
    data.prepare_data()
    data.setup("fit")
    train_batches, test_batches = data.train_dataloader(), list(data.test_dataloader())

    net = lenet()
    device_params = [get_params(dict(net.named_parameters()), device) for device in devices]
    schedule = get_algorithm(algorithm).make_schedule(num_devices)
    accuracy, seconds = 0.0, []
    for epoch in range(epochs):
        start = time.perf_counter()
        train_batches.sampler.set_epoch(epoch)
        for images, labels in train_batches:
            train_batch(net, images, labels, device_params, devices, schedule, lr)
        seconds.append(time.perf_counter() - start)
        accuracy = evaluate(net, test_batches, device_params, devices)
        print(f"epoch {epoch + 1}: test acc {accuracy:.3f}")
    names = ", ".join(str(device) for device in devices)
    print(f"test acc: {accuracy:.3f}, {sum(seconds) / epochs:.1f} sec/epoch with {algorithm} on {names}")
    return accuracy


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of devices (default: 2)")
    parser.add_argument("--batch-size", type=int, default=128, help="split over all devices (default: 128)")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: 0.2)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default: 10)")
    parser.add_argument(
        "--algorithm",
        choices=available_algorithms(),
        default="allreduce",
        help="how gradients are summed (default: allreduce, the tutorial's own)",
    )
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST")
    flags = parser.parse_args()
    if flags.devices < 1 or flags.epochs < 1 or flags.lr <= 0:
        parser.error("--devices and --epochs must be at least 1, and --lr above 0")
    if flags.batch_size < flags.devices:
        parser.error(f"--batch-size {flags.batch_size} is smaller than the number of devices ({flags.devices})")
    try:
        train(flags.devices, flags.batch_size, flags.lr, flags.epochs, flags.algorithm, flags.data_dir)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
