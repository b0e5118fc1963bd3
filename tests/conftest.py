"""What every test session needs: a reason to skip GPU tests, and a fork server for the ranks."""

from __future__ import annotations

import pytest
import torch

from harness import run_ranks, start_server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the fork server preload while the first tests run, if any of them starts ranks."""
    if session.config.option.collectonly:
        return
    modules = {getattr(item, "module", None) for item in session.items}
    if any(run_ranks in vars(module).values() for module in modules if module is not None):
        start_server()
