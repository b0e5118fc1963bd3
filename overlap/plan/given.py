"""A plan that the user gives: whether all ranks have the same, and whether it was made for what is there."""

from __future__ import annotations

from torch import nn

from overlap.errors import ConfigurationError
from overlap.join.board import Agreement
from overlap.plan.candidates import Candidate
from overlap.plan.plan import Plan

__all__ = ["agreed", "check_alike"]


def check_alike(plan: Plan | None, agreement: Agreement) -> None:
    """Raises: ConfigurationError: some ranks were given a plan, and others are to measure."""
    given = agreement.agree(plan is not None)
    if len(set(given)) > 1:
        raise ConfigurationError(
            f"plan was given on rank {given.index(True)} and not on rank {given.index(False)}: give the same on all"
        )


def agreed(plan: Plan, model: nn.Module, agreement: Agreement) -> Plan:
    """``plan``.

    Raises:
        ConfigurationError: it was made for something else, or other ranks have another one.
    """
    if plan.ranks != agreement.size:
        raise ConfigurationError(
            f"plan was made for {plan.ranks} ranks, and here are {agreement.size}: leave it out to choose anew"
        )
    count = sum(parameter.requires_grad for parameter in model.parameters())
    if plan.parameters not in (None, count):
        raise ConfigurationError(
            f"plan was made for a model with {plan.parameters} trained parameters, and this one has {count}: leave it "
            "out to choose anew"
        )
    chosen = [plan.method, plan.bucket_cap_mb]
    for rank, other in enumerate(agreement.agree(chosen)):
        if other != chosen:
            raise ConfigurationError(
                f"plan says {plan.candidate} on rank {agreement.rank} and {Candidate(*other)} on rank {rank}: load the "
                "same file on all"
            )
    return plan
