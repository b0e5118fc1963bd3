"""A recording of training steps: what was computed, sent and updated, and what of it was exposed.

recording  the `with` block, its hooks and clocks, and from marks to steps
report     the steps of all ranks, their intervals and what follows from them, as a table and as a trace
"""

from __future__ import annotations

from overlap._torch.autograd import profile
from overlap.timeline.recording import Timeline
from overlap.timeline.report import Activity, BucketReport, Interval, Phase, Report, StepReport

__all__ = [
    "Activity",
    "BucketReport",
    "Interval",
    "Phase",
    "Report",
    "StepReport",
    "Timeline",
    "profile",
]
