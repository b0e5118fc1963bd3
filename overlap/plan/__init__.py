"""Choosing how to reduce and update, by measurement: :func:`auto`, and the plan that it makes.

choose      `auto`: measures, predicts, races, and builds what it chose;  request: its arguments, checked
decision    from predictions and samples to a plan
plan        what was chosen and why: the table, the reason, saving and loading
profile     what a step computes, as numbers;  compute: measuring them on a copy of the model
copies      copies to measure on, and a check that the originals are as they were
link        what a collective costs, as a line through measurements;  wire_times: measuring it
buckets     how DDP cuts gradients into buckets
dry         what a reducer computes and sends, found out without sending
candidates  what may be chosen, how each is built, what memory it takes
schedule    a step as a schedule, simulated by the rules of the engine;  clock: the simulation's clock
predict     every candidate's step time from a profile, a link and the costs of its stages
race        the best candidates timed against plain DDP
picture     the report as a picture
"""

from __future__ import annotations

from overlap.plan.choose import auto
from overlap.plan.plan import Plan

__all__ = ["Plan", "auto"]
