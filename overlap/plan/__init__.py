"""Choosing how to reduce and to update by racing: :func:`auto`, and the :class:`Plan` that it makes.

choice      `auto`, the rule by which it decides, and the plan
candidates  the chains to choose from, and their construction
race        real steps on copies, each candidate beside plain DDP
"""

from __future__ import annotations

from overlap.plan.choice import Plan, auto

__all__ = ["Plan", "auto"]
