"""Examples in docstrings run as they stand, and what is public says what it does."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
from types import ModuleType

import pytest
import torch

import overlap
import overlap.hooks
import overlap.join
import overlap.optim

PACKAGES = [
    "overlap.hooks",
    "overlap.optim",
    "overlap.join",
    "overlap.compose",
    "overlap.activations",
    "overlap.quantized",
]
PUBLIC = [overlap, overlap.hooks, overlap.optim, overlap.join]


# Modules that need what the library does without where it is not there.
NEEDS = {"overlap.hooks.wires.triton_kernels": "triton"}


def _modules() -> list[str]:
    names = ["overlap"]
    for package in PACKAGES:
        module = importlib.import_module(package)
        names.append(package)
        names += [info.name for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{package}.")]
    return [name for name in names if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "overlap": overlap})
    assert result.failed == 0


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder()
    examples = [test for name in _modules() for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 5


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_everything_public_is_documented(module: ModuleType) -> None:
    undocumented = [
        name
        for name in module.__all__
        if (inspect.isclass(public := getattr(module, name)) or inspect.isfunction(public)) and not public.__doc__
    ]
    assert not undocumented
