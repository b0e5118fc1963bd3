"""The optimizers of other packages that are known without a declaration pass the experiment, and the page has them."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from optimizers import LEFT_OUT, MATRICES_ONLY, NEEDS_ALL, PAGE, PACKAGES, REASONS, arguments, classes, grouped, variants
from optimizers import known_here as known

from overlap.optim.declared import KNOWN
from tools.check_optimizer import check

KNOWN_HERE = known()


def _differences(name: str, **options: Any) -> dict[str, str]:
    cls = KNOWN_HERE[name]
    found = check(
        partial(grouped, cls), only_matrices=name in MATRICES_ONLY, all_have_gradients=name in NEEDS_ALL, **options
    )
    units = ("interleaved", "parameter") if KNOWN[name] == "parameter" else ("interleaved", "parameter", "element")
    return {unit: found[unit] for unit in units if found[unit]}


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in KNOWN_HERE}))
def test_what_is_known_steps_in_parts_as_it_does_whole(package: str) -> None:
    torch.set_num_threads(1)
    wrong = {}
    for name in (name for name in KNOWN_HERE if name.startswith(f"{package}.")):
        if found := _differences(name, **arguments(KNOWN_HERE[name])):
            wrong[name] = found
    assert not wrong


def test_every_class_of_these_packages_is_known_or_left_out_for_a_reason() -> None:
    assert set(LEFT_OUT.values()) <= set(REASONS)
    assert not set(LEFT_OUT) & set(KNOWN)
    assert not set(classes()) - set(LEFT_OUT) - set(KNOWN)
    assert not {name for name in KNOWN if not name.startswith("torch.")} - set(classes())
