"""A fork server for the ranks of a test session."""

import itertools
import os
import sys
from collections import deque

import pytest

from harness import end_ahead, start_server

# Hundreds of processes import the package and its tests: compiled once, also where Python writes no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the fork server preload while tests are collected; most sessions start ranks."""
    if not session.config.option.collectonly:
        start_server()


_AHEAD = 12
_left: deque[pytest.Item] = deque()
"""The tests that are yet to run."""


def pytest_collection_finish(session: pytest.Session) -> None:
    _left.extend(session.items)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Has the worlds of the tests that come next played beside this one, where they need no fixture."""
    while _left and _left.popleft() is not item:
        pass
    for later in itertools.islice(_left, _AHEAD):
        if isinstance(later, pytest.Function) and hasattr(later.function, "begin"):
            given = later.callspec.params if hasattr(later, "callspec") else {}
            if given.keys() == {*later.fixturenames}:
                later.function.begin(given)


def pytest_sessionfinish() -> None:
    end_ahead()
