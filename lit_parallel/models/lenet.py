"""LeNet as the tutorial on multi-GPU training defines it."""

from __future__ import annotations

from torch import nn


def lenet(num_classes: int = 10) -> nn.Sequential:
    """LeNet for 28x28 images: 129,068 parameters with 10 classes.

    Source: Zhang et al., *Dive into Deep Learning*, section 13.5.

    Args:
        num_classes: Length of the output.

    Returns:
        A module from (N, 1, 28, 28) to logits (N, num_classes).
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
