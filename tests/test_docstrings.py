"""Examples in docstrings run as they stand, and what is public says what it does."""

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import test_public_names
import torch

import overlap
import overlap.hooks
import overlap.join
import overlap.optim
from harness.documented import examples_on_one_rank

PACKAGES = [
    "overlap.hooks",
    "overlap.optim",
    "overlap.join",
    "overlap.compose",
]


def _modules() -> list[str]:
    names = ["overlap"]
    for package in PACKAGES:
        module = importlib.import_module(package)
        names.append(package)
        names += [info.name for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{package}.")]
    return names


NAMES = {name: f"{package}.{name}" for package, names in reversed(test_public_names.NAMES.items()) for name in names}
"""Every public name, and where it is imported from."""


def _public(path: str) -> Any:
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(package), name)


def _failures(tests: list[doctest.DocTest], namespace: dict[str, Any]) -> list[str]:
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        test.globs = {**test.globs, **namespace}
        runner.run(test, out=said.append)
    return said


@pytest.mark.parametrize("path", sorted(NAMES.values()))
def test_every_public_name_has_an_example_that_runs(path: str) -> None:
    """With no other names than those that the reference says an example may use."""
    public = _public(path)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(public) or "", {}, path, None, None)
    assert example.examples
    with examples_on_one_rank() as namespace:
        assert _failures([example], namespace) == []


@pytest.mark.parametrize("name", _modules())
def test_other_examples_run(name: str) -> None:
    """Those of modules, of methods and of what is not public, which may use the names of their module."""
    public = {id(_public(path)) for path in NAMES.values()}
    module = importlib.import_module(name)
    found = doctest.DocTestFinder().find(module, extraglobs={"torch": torch, "overlap": overlap})
    tests = [
        test
        for test in found
        if test.examples and id(getattr(module, test.name.rpartition(".")[2], None)) not in public
    ]
    assert _failures(tests, {}) == []
