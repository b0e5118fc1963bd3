"""What each integration is said to do: the table of docs/reports/integrations.md, and the tests that it is made of.

``python tests/integrations/features.py`` prints the tables. A test plays each row with all forms beside the framework
without us, and fails where a cell is not what is declared here.
"""

from dataclasses import dataclass


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
_FEW = ("interleaved", "zero", "local")
"""Where the form can hardly matter."""


def _row(default: str = PLAIN, *, of: tuple[str, ...] = _EVERY, **others: str | Refused) -> dict[str, str | Refused]:
    """The forms ``of`` as ``default`` says, and ``others`` otherwise."""
    row = dict.fromkeys(of, default) | {form.replace("_", " "): cell for form, cell in others.items()}
    return {form: row[form] for form in FORMS if form in row}


_LATE = Refused("clips after backward", "cannot be changed after backward")
_LATE_ZERO = Refused("clips after backward", "zero.clip_grad_norm_() after backward")
_PARTS = Refused("a rank has its part of a gradient alone", "neither be read nor changed after backward")
_SYNC = Refused("steps every k batches", "a second backward began before")
_ADDS = Refused("`ZeroStep` cannot add backwards up", "a second backward began before")

_WITHOUT_LOCAL = ("interleaved", "deferred", "zero", "zero deferred", "reducer")
_WITHOUT_REDUCER = ("interleaved", "deferred", "zero", "zero deferred", "local")
_SUMMED = {"zero": ROUNDED, "zero_deferred": ROUNDED}

FRAMEWORKS: dict[str, dict[str, dict[str, str | Refused]]] = {
    "Lightning": {
        "`fit` with validation and a schedule": _row(),
        "`accumulate_grad_batches=3`": _row(),
        "`gradient_clip_val`": _row(**_SUMMED),
        '`gradient_clip_val`, `gradient_clip_algorithm="value"`': _row(of=("interleaved", "local"), zero=_PARTS),
        '`precision="bf16-mixed"`': _row(of=_FEW),
        '`precision="16-mixed"`, with skipped updates': _row(of=_WITHOUT_REDUCER),
        '`precision="16-mixed"`, `gradient_clip_val`': _row(of=_WITHOUT_REDUCER, **_SUMMED),
        "two optimizers, manual: a GAN with `skip_update()`": _row(of=_WITHOUT_LOCAL),
        "`validate`, `fit`, `test`, `predict`, `fit` of one trainer": _row(),
        "a checkpoint within an epoch, resumed": _row(SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint, resumed in plain Lightning": _row(of=("interleaved", "zero")),
        "a checkpoint of plain Lightning, resumed": _row(of=("interleaved", "zero")),
    },
    "Accelerate": {
        "a loop with a schedule": _row(),
        "`accumulate`, 3 batches": _row(),
        "`accumulate`, `sync_each_batch=True`": _row(
            of=("deferred", "local"), interleaved=_SYNC, zero=_SYNC, zero_deferred=_ADDS
        ),
        "`clip_grad_norm_`": _row(interleaved=_LATE, zero=_LATE_ZERO, zero_deferred=ROUNDED),
        "`clip_grad_value_`": _row(interleaved=_LATE, zero=_PARTS, zero_deferred=_PARTS),
        '`mixed_precision="fp16"`, with skipped updates': _row(),
        '`mixed_precision="fp16"`, `clip_grad_norm_`': _row(**_SUMMED),
        "two models, one of them with a chain, and `clip_grad_norm_` of the other": _row(of=_FEW),
        "another model after `free_memory()`": _row(of=_FEW),
        "`save_state`, `load_state`": _row(SAME_RUN, powersgd=SAME_RUN),
        "`save_state`, `load_state` in plain Accelerate": _row(of=("interleaved", "zero")),
        "`save_state` of plain Accelerate, `load_state`": _row(of=("interleaved", "zero")),
        "`overlap.Join`, with `even_batches=False`": _row(JOINED, of=_FEW),
    },
    "HF Trainer": {
        "`max_grad_norm=0`": _row(),
        "`max_grad_norm`": _row(**_SUMMED),
        "`max_grad_norm` and `ddp_find_unused_parameters` as by default": _row(of=("interleaved", "local")),
        "`gradient_accumulation_steps=3`": _row(of=_FEW),
        "evaluation, and the best model loaded at the end": _row(of=_FEW),
        "`train()` after one that failed": _row(of=_FEW),
        "a checkpoint, resumed": _row(SAME_RUN, powersgd=SAME_RUN),
        "a checkpoint, resumed in the plain Trainer": _row(of=("interleaved", "zero")),
        "a checkpoint of the plain Trainer, resumed": _row(of=("interleaved", "zero")),
    },
}


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
