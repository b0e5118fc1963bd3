"""The faults, by name, and to which forms each applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .forms import Form


def _always(form: Form) -> bool:
    return True


def _with_stages(form: Form) -> bool:
    return form.has_stages


def _not_joined(form: Form) -> bool:
    return not form.is_joined  # There any number of steps is allowed.


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank, the victim."""

    name: str
    victim_ends: bool = True  # Without an error of its own: killed.
    is_sent: bool = False  # By the parent, a moment after the step has begun.
    waits_for_timeout: bool = False  # Nobody can know before the group's timeout is over.
    applies: Callable[[Form], bool] = _always


_ALL = (
    Fault(name="none", victim_ends=False),
    Fault(name="SIGKILL", is_sent=True),
    Fault(name="SIGTERM", is_sent=True),
    Fault(name="SIGTERM, handled", is_sent=True, victim_ends=False),
    Fault(name="SIGSTOP", is_sent=True, victim_ends=False, waits_for_timeout=True),
    Fault(name="exception in a stage", victim_ends=False, applies=_with_stages),
    Fault(name="exception in the loss", victim_ends=False),
    Fault(name="exception in the loader", victim_ends=False),
    Fault(name="out of memory", victim_ends=False),
    Fault(name="full disk", victim_ends=False),
    Fault(name="killed in a save", victim_ends=True),
    Fault(name="another plan", victim_ends=False, applies=_with_stages),
    Fault(name="a step more", victim_ends=False, waits_for_timeout=True, applies=_not_joined),
)
FAULTS = {fault.name: fault for fault in _ALL}
