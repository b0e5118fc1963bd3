"""torchvision beside any build of torch."""

from __future__ import annotations

from overlap._torchvision import load_torchvision


def test_torchvision_is_there_whatever_it_was_built_for() -> None:
    torchvision = load_torchvision()
    assert torchvision is load_torchvision()
    assert torchvision.models.resnet18(num_classes=10).fc.out_features == 10
