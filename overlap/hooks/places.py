"""Where the stages of a chain stand, and which of them may stand where."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks.stage import Role, Stage

__all__ = ["check_pass", "check_places"]


def check_places(sequence: Sequence[Stage]) -> None:
    """Tell each stage of a chain what stands around it.

    Raises:
        ConfigurationError: a transform stands where it would see something else than it seems to, or a stage refuses
            its place.
    """
    for place, stage in enumerate(sequence):
        before, after = sequence[:place], sequence[place + 1 :]
        if stage.role is Role.TRANSFORM:
            _check_transform(stage, before, after)
        stage.placed(before, after)


def _check_transform(stage: Stage, before: Sequence[Stage], after: Sequence[Stage]) -> None:
    updates = [one for one in before if one.role is Role.UPDATE]
    if not updates:
        return
    later = next((one for one in after if one.role is Role.UPDATE), None)
    if later is not None:
        raise ConfigurationError(
            f"{stage!r} stands between the updates {updates[-1]!r} and {later!r}, where some parameters are new and "
            "some are not: put it before both or after both"
        )
    deferred = next((one for one in updates if one.updates_after_backward), None)
    if deferred is not None:
        raise ConfigurationError(
            f"{stage!r} stands after {deferred!r}, which makes new parameters only after backward, so it would see "
            "the old ones: put it before the update, use an update that is made in backward, or do the same by hand "
            "after step()"
        )


def check_pass(sequence: Sequence[Stage]) -> None:
    """Called when a backward begins.

    Raises:
        TrainingLoopError: a transform of new parameters would see old ones in this pass.
    """
    skipped: Stage | None = None
    for stage in sequence:
        if stage.role is Role.UPDATE and stage.leaves_update:
            skipped = skipped or stage
        elif stage.role is Role.TRANSFORM and skipped is not None:
            raise TrainingLoopError(
                f"skip_update() leaves the update of {skipped!r} to step(), so {stage!r} after it would see old "
                "parameters: leave that stage out, and do the same by hand after step()"
            )
