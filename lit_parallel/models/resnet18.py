"""ResNet-18 for small images, as the tutorial's concise multi-GPU training defines it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Residual(nn.Module):
    """Two 3x3 convolutions with batch normalisation, added to the input (He et al. 2016)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, kernel_size=3, padding=1, stride=stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """ResNet-18 with a 3x3 stem and no max-pooling: 11,175,818 parameters with 10 classes and 1 channel.

    Convolutions have biases; convolution and linear weights start as N(0, 0.01).
    Source: Zhang et al., *Dive into Deep Learning*, section 13.6.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the images.

    Returns:
        A module from (N, in_channels, H, W) to logits (N, num_classes).
    """
    stages = []
    channels = 64
    for index, width in enumerate((64, 128, 256, 512)):
        stages += [_Residual(channels, width, stride=1 if index == 0 else 2), _Residual(width, width, stride=1)]
        channels = width
    net = nn.Sequential(
        nn.Conv2d(in_channels, 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(module.weight, std=0.01)
    return net
