"""ResNet-18 and ResNet-50 (He et al., 2015), with the parameters of torchvision's, which need not be installed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RESNETS", "ResNet"]

# Name -> blocks of each of the four stages, and whether they are bottlenecks.
RESNETS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}
_EXPANSION = 4


class ResNet(nn.Module):
    """The network called ``name``: images of shape ``(n, 3, height, width)`` to logits of shape ``(n, classes)``.

    ``channels`` are those of the first stage, doubled in each that follows.
    """

    def __init__(self, name: str, *, channels: int = 64, classes: int = 1000) -> None:
        super().__init__()
        depths, is_deep = RESNETS[name]
        self.stem = nn.Sequential(
            *_convolution(3, channels, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        blocks: list[nn.Module] = []
        widths = [channels * 2**stage for stage in range(len(depths))]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                out = width * _EXPANSION if is_deep else width
                blocks.append(_Block(channels, width, out, stride=2 if stage and not place else 1))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Two convolutions of 3 x 3; or one, between two of 1 x 1, where it hands on more channels than it works on."""

    def __init__(self, channels: int, width: int, out: int, *, stride: int) -> None:
        super().__init__()
        if out > width:
            layers = [
                *_convolution(channels, width, 1), nn.ReLU(),
                *_convolution(width, width, 3, stride=stride), nn.ReLU(),
                *_convolution(width, out, 1),
            ]  # fmt: skip
        else:
            layers = [*_convolution(channels, width, 3, stride=stride), nn.ReLU(), *_convolution(width, out, 3)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(*_convolution(channels, out, 1, stride=stride) if channels != out else ())

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(self.layers(hidden) + self.shortcut(hidden))


def _convolution(channels: int, out: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]
