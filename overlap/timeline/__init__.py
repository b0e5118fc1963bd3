"""A recording of training steps: what was computed, sent and updated, and what of it was exposed.

timeline   the `with` block;  loop: the hooks on the model;  recording: marks taken inside a step
clock      how a time mark is taken and read, on the CPU and on CUDA
reading    from marks to steps;  steps: their intervals and what follows from them;  spans: arithmetic of intervals
report     the steps of all ranks
profile    PyTorch's profiler, of all threads
saving     a file by its suffix;  table, drawing, trace: text, picture, Perfetto
"""

from __future__ import annotations

from overlap._torch.profiling import profile
from overlap.timeline.report import Report
from overlap.timeline.saving import save_reports
from overlap.timeline.spans import Interval
from overlap.timeline.steps import Activity, BucketReport, Phase, StepReport
from overlap.timeline.timeline import Timeline

__all__ = [
    "Activity",
    "BucketReport",
    "Interval",
    "Phase",
    "Report",
    "StepReport",
    "Timeline",
    "profile",
    "save_reports",
]
