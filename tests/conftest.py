"""A fork server for the ranks of a test session."""

import os
import sys

import pytest

from harness import end_ahead, start_server

# Hundreds of processes import the package and its tests: compiled once, also where Python writes no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the fork server preload while tests are collected; most sessions start ranks."""
    if not session.config.option.collectonly:
        start_server()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the worlds of ranks played beside the tests, in their order, where they need no fixture."""
    for item in () if session.config.option.collectonly else session.items:
        if isinstance(item, pytest.Function) and hasattr(item.function, "begin"):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if given.keys() == {*item.fixturenames}:
                item.function.begin(given)


def pytest_sessionfinish() -> None:
    end_ahead()
