"""What type checkers see of a program that uses the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parent.parent

_PROGRAM = """
from collections.abc import Iterator
from typing import assert_type

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import Join, checkpoint_wrapper, offload_wrapper


def keep_the_item_type(ddp: DistributedDataParallel, pairs: list[tuple[Tensor, int]]) -> None:
    with Join([ddp]) as join:
        assert_type(join.iterate(pairs), Iterator[tuple[Tensor, int]])
        for _, y in join.iterate(pairs):
            y.no_such_attribute


def keep_the_modules_type(layer: torch.nn.Linear) -> None:
    assert_type(checkpoint_wrapper(layer, offload_to_cpu=True), torch.nn.Linear)
    assert_type(offload_wrapper(layer).in_features, int)
    checkpoint_wrapper("layer")
"""


def test_loaders_and_wrapped_modules_keep_their_types(tmp_path: Path) -> None:
    """With the settings and the cache of `make check`, which has run before the tests."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(program)]
    shown = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    found = [line.rpartition(f"{program.name}:")[2] for line in shown.stdout.splitlines()]
    number = {line.split("(")[0].strip(): count for count, line in enumerate(_PROGRAM.splitlines(), 1)}
    attribute, variable = found
    assert attribute.startswith(f'{number["y.no_such_attribute"]}: error: "int" has no attribute "no_such_attribute"')
    assert variable.startswith(f"{number['checkpoint_wrapper']}: error: Value of type variable")
