"""The optimizers of other packages that are known without a declaration pass the experiment, and the page has them."""

from __future__ import annotations

import pytest
import torch
from optimizers import LEFT_OUT, PAGE, REASONS, arguments, classes, differences, known_here

from overlap.optim.declared import KNOWN

KNOWN_HERE = known_here()


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in KNOWN_HERE}))
def test_what_is_known_steps_in_parts_as_it_does_whole(package: str) -> None:
    torch.set_num_threads(1)
    those = {name: cls for name, cls in KNOWN_HERE.items() if name.startswith(f"{package}.")}
    found = {name: differences(name, cls, arguments(cls)) for name, cls in those.items()}
    assert not {name: what for name, what in found.items() if what}


def test_every_class_of_these_packages_is_known_or_left_out_for_a_reason() -> None:
    assert set(LEFT_OUT.values()) <= set(REASONS)
    assert not set(LEFT_OUT) & set(KNOWN)
    assert set(classes()) == set(LEFT_OUT) | {name for name in KNOWN if not name.startswith("torch.")}


def test_the_page_shows_what_is_known_and_that_none_is_silently_different() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {row[0]: row[1:] for row in rows if row[0] in classes()}
    assert set(shown) == set(classes())
    for name, (unit, *signs) in shown.items():
        if name in KNOWN:
            assert unit == KNOWN[name] and signs == ["+"] * 4
        else:
            assert unit == REASONS[LEFT_OUT[name]] and set(signs) <= {"+", "R", "-"}
