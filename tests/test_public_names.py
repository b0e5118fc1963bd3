"""What may be imported from where; docs/api pins the names, and a change there belongs into the changelog."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import overlap
from overlap._lazy import REMOVED

PACKAGES = (
    "overlap",
    "overlap.hooks",
    "overlap.optim",
    "overlap.errors",
    "overlap.plan",
    "overlap.resume",
    "overlap.join",
)
NAMES = {name: sorted(importlib.import_module(name).__all__) for name in PACKAGES}
"""The public names; docs/api has each of them, once."""


EVERY_MODULE = pytest.mark.parametrize("name", NAMES)


def test_the_first_page_is_short() -> None:
    assert len(overlap.__all__) <= 40


@EVERY_MODULE
def test_every_listed_name_of_a_package_is_an_attribute_of_overlap_too(name: str) -> None:
    module = importlib.import_module(name)
    assert all(getattr(overlap, public) is getattr(module, public) for public in module.__all__)


def test_dir_shows_the_names_and_the_packages_and_no_helpers() -> None:
    shown = {name for name in dir(overlap) if not name.startswith("__")}
    packages = {name.partition(".")[2] for name in NAMES} - {""}
    assert shown == {*overlap.__all__, *packages, "compose", "timeline"}


def test_a_removed_name_says_what_takes_its_place() -> None:
    for name, instead in REMOVED.items():
        with pytest.raises(AttributeError, match=re.escape(f"overlap.{name} has been removed: {instead}")):
            getattr(overlap, name)
        with pytest.raises(ImportError, match=re.escape(instead)):
            exec(f"from overlap import {name}")


def test_the_links_at_the_root_are_not_packages() -> None:
    """Imported by that name they would be second copies, with classes of their own."""
    links = ("hooks", "join", "optim")
    program = f"for package in {links}:\n    try: __import__(package)\n    except ImportError as error: print(error)\n"
    root = Path(__file__).parents[1]
    shown = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    for package, said in zip(links, shown.stdout.splitlines(), strict=True):
        assert said.startswith(f"import overlap.{package}, not {package}")
