"""Choosing how to reduce and to update by racing: :func:`auto`, and the :class:`Plan` that it makes.

choose      `auto`: its arguments, and the order of everything
candidates  the chains to choose from: their results, their construction, their memory
measure     copies to measure on; the computation of a step, and the link
race        successive halving of real steps, each candidate beside plain DDP
decision    the rule, and the plan: its table, its reason, its file
"""

from __future__ import annotations

from overlap.plan.choose import auto
from overlap.plan.decision import Plan

__all__ = ["Plan", "auto"]
