"""What each integration is said to do: the table of docs/reports/integrations.md, and the tests that it is made of.

``python tests/integrations/features.py`` prints the tables. A test plays each row with all forms beside the framework
without us, and fails where a cell is not what is declared here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMS", "FRAMEWORKS", "Refused", "cells", "table"]


@dataclass(frozen=True)
class Refused:
    """An error that begins with ``message``; the table says ``why``."""

    why: str
    message: str


FORMS = {
    "interleaved": "`Step(o)`",
    "deferred": "`Step(o, deferred=True)`",
    "zero": "`ZeroStep(zero)`",
    "zero deferred": "`ZeroStep(zero, deferred=True)`",
    "powersgd": "`PowerSGD(rank=2), Step(o)`",
    "reducer": "`AllReduce()` alone",
    "local": "`LocalSGD`",
}
PLAIN = "= plain"
SAME_RUN = "= uninterrupted"
JOINED = "= PyTorch loop"
ROUNDED = "= plain, up to the order of summation"

_EVERY = ("interleaved", "deferred", "zero", "zero deferred", "reducer", "local")


def _row(default: str | None = PLAIN, **others: str | Refused | None) -> dict[str, str | Refused]:
    """All forms as ``default`` says, and some otherwise; where ``None``, the table has no cell."""
    row = dict.fromkeys(_EVERY, default) | {form.replace("_", " "): cell for form, cell in others.items()}
    return {form: row[form] for form in FORMS if row.get(form) is not None}  # type: ignore[misc]


_LATE_NORM = Refused("clips after backward", "clip_grad_norm_(..., 0.05) comes after backward")
_LATE_VALUE = Refused("clips after backward", "clip_grad_value_(..., 0.01) comes after backward")
_SYNC = Refused("steps every k batches", "sync_each_batch=True reduces each batch, and steps every 3 batches")
_ADDS = Refused("`ZeroStep` cannot add backwards up", "a second backward began before")

FRAMEWORKS: dict[str, dict[str, dict[str, str | Refused]]] = {
    "Lightning": {
        "`fit` with validation and a schedule": _row(),
        "`accumulate_grad_batches=3`": _row(),
        "`gradient_clip_val`": _row(zero=ROUNDED, zero_deferred=ROUNDED),
        "clipping in the chain": _row(None, deferred=PLAIN, zero_deferred=ROUNDED),
        '`gradient_clip_val`, `gradient_clip_algorithm="value"`': _row(),
        '`precision="bf16-mixed"`': _row(),
        '`precision="bf16-true"`': _row(),
        '`precision="64-true"`': _row(),
        '`precision="16-mixed"`, with skipped updates': _row(reducer=None),
        '`precision="16-mixed"`, `gradient_clip_val`': _row(zero=ROUNDED, zero_deferred=ROUNDED, reducer=None),
        "manual optimization": _row(),
        "two optimizers, manual: a GAN with `skip_update()`": _row(local=None),
        "two `fit` of one trainer": _row(),
        "`validate`, `fit`, `test`, `predict`, `fit` of one trainer": _row(),
        "`LearningRateFinder`": _row(),
        "`StochasticWeightAveraging`, `EMAWeightAveraging`": _row(),
        "a checkpoint, resumed": _row(SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint within an epoch, resumed": _row(SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint within an accumulation, resumed": _row(),
        "a checkpoint, resumed in plain Lightning": _row(powersgd=None, local=None),
        "a checkpoint of plain Lightning, resumed": _row(powersgd=None, local=None),
        "uneven inputs": _row(JOINED),
    },
    "Accelerate": {
        "a loop with a schedule": _row(),
        "`accumulate`, 3 batches": _row(),
        "`accumulate`, `sync_each_batch=True`": _row(interleaved=_SYNC, zero=_SYNC, zero_deferred=_ADDS, local=PLAIN),
        "`clip_grad_norm_`": _row(interleaved=_LATE_NORM, zero=_LATE_NORM, zero_deferred=ROUNDED),
        "`clip_grad_value_`": _row(interleaved=_LATE_VALUE, zero=_LATE_VALUE),
        '`mixed_precision="bf16"`': _row(),
        '`mixed_precision="fp16"`, with skipped updates': _row(),
        '`mixed_precision="fp16"`, `clip_grad_norm_`': _row(zero=ROUNDED, zero_deferred=ROUNDED),
        "two models, one of them with a chain, and `clip_grad_norm_` of the other": _row(),
        "another model after `free_memory()`": _row(),
        "`save_state`, `load_state`": _row(SAME_RUN, powersgd=SAME_RUN),
        "`save_state` within an accumulation, `load_state`": _row(),
        "`save_state`, `load_state` in plain Accelerate": _row(local=None),
        "`save_state` of plain Accelerate, `load_state`": _row(local=None),
        "`join_uneven_inputs`": _row(JOINED),
    },
    "HF Trainer": {
        "BERT, `max_grad_norm=0`": _row(),
        "GPT-2, `max_grad_norm=0`": _row(),
        "`max_grad_norm`": _row(zero=ROUNDED, zero_deferred=ROUNDED),
        "`max_grad_norm` and `ddp_find_unused_parameters` as by default": _row(zero=ROUNDED, zero_deferred=ROUNDED),
        "`gradient_accumulation_steps=3`": _row(),
        "`bf16=True`": _row(),
        "`gradient_checkpointing=True`": _row(),
        "evaluation, and the best model loaded at the end": _row(),
        "two `train()` of one trainer": _row(),
        "`train()` after one that failed": _row(),
        "`auto_find_batch_size=True`, at the second attempt": _row(),
        "a checkpoint, resumed: BERT": _row(SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint, resumed: GPT-2": _row(None, interleaved=SAME_RUN, zero=SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint, resumed in the plain Trainer": _row(local=None),
        "a checkpoint of the plain Trainer, resumed": _row(local=None),
    },
}


def cells(framework: str, feature: str) -> dict[str, str | Refused]:
    """What each form does."""
    return FRAMEWORKS[framework][feature]


def table(framework: str) -> str:
    """The table of a framework, in Markdown."""
    lines = [f"| {framework} | {' | '.join(FORMS.values())} |", f"| --- |{' --- |' * len(FORMS)}"]
    for feature, row in FRAMEWORKS[framework].items():
        shown = [_shown(row.get(form)) for form in FORMS]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(cell: str | Refused | None) -> str:
    return f"refused: {cell.why}" if isinstance(cell, Refused) else cell or ""


if __name__ == "__main__":
    print("\n\n".join(table(framework) for framework in FRAMEWORKS))
