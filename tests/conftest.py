"""A fork server for the ranks of a test session."""

import os
import sys

import pytest

from harness import start_server

# Hundreds of processes import the package and its tests: compiled once, also where Python writes no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the fork server preload while tests are collected; most sessions start ranks.

    Each of several workers has a server of its own, and the session that hands tests to them has none.
    """
    hands_on = getattr(session.config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if not session.config.option.collectonly and not hands_on:
        start_server()
