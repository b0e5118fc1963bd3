"""Choosing how to reduce and to update by racing: :func:`auto`, and the :class:`Plan` that it makes.

choice      `auto`, the rule by which it decides, and the plan
candidates  the chains to choose from, and their construction
copies      the models to race on, and originals that stay as they are
race        successive halving of real steps, each candidate beside plain DDP
"""

from __future__ import annotations

from overlap.plan.choice import Plan, auto

__all__ = ["Plan", "auto"]
