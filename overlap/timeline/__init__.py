"""A recording of training steps: computation, communication and updates, and the exposed part.

recording  the `with` block, its hooks and clocks, and from marks to steps
report     the steps of all ranks, their intervals, as a table and as a trace
"""

from __future__ import annotations

from overlap._torch.autograd import profile
from overlap.timeline.recording import Timeline
from overlap.timeline.report import Activity, BucketReport, Interval, Report, Span, StepReport

__all__ = [
    "Activity",
    "BucketReport",
    "Interval",
    "Span",
    "Report",
    "StepReport",
    "Timeline",
    "profile",
]
