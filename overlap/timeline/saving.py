"""One file of one or several reports, by its suffix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from overlap._checks import require_extra
from overlap.errors import ConfigurationError
from overlap.timeline.report import Report

__all__ = ["check_path", "save_reports"]

_PICTURES = (".png", ".svg", ".pdf")


def check_path(path: str | Path) -> None:
    """Raises: ConfigurationError: nothing can be written under this name, or what that needs is not installed."""
    suffix = Path(path).suffix.lower()
    if suffix in _PICTURES:
        require_extra("timeline", "matplotlib")
    elif suffix != ".json":
        allowed = ", ".join(_PICTURES)
        raise ConfigurationError(f"path is {str(path)!r}: a picture ends in {allowed}, a trace in .json")


def save_reports(reports: Mapping[str, Report], path: str | Path, *, step: int | None = None) -> None:
    """Write reports, each under its title, to one file: a picture with a panel for each, or a trace.

    Args:
        reports: by title, in the order in which they are shown.
        path: ``.png``, ``.svg`` or ``.pdf`` for a picture of one step of each, ``.json`` for a trace of all steps.
        step: which step to draw; by default the one that took rank 0 the median time, in each report.

    Raises:
        ConfigurationError: the suffix is none of these, there is no such step, or a picture needs matplotlib.
    """
    check_path(path)
    if Path(path).suffix.lower() == ".json":
        from overlap.timeline.trace import save_trace

        save_trace(reports, path)
        return
    from overlap.timeline.drawing import save_picture

    save_picture(reports, path, step=step)
