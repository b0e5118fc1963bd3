"""The task that was asked for, with its data."""

from __future__ import annotations

from overlap.race.images import image_task
from overlap.race.settings import Settings
from overlap.race.task import Task
from overlap.race.text import text_task

__all__ = ["load_task"]


def load_task(settings: Settings) -> Task:
    """Reads the data of the task and says how it is trained.

    Raises:
        ConfigurationError: the data is not what the task needs.
    """
    return text_task(settings) if settings.task == "text" else image_task(settings)
