"""The checks, on a GPU where there is one; elsewhere some of each kind on the CPU, so that they are known to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .check import Check
from .runner import Runner
from .table import checks

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_CHAINS_ON_CPU = {
    "AllReduce, Step",
    "route, ZeroStep, gather in forward",
    "LocalSGD, outer, overlapped, few bits",
    "ZeroStep, Join",
}
_ON_CPU = {
    "AllReduce, Step",
    "PowerSGD in Int8, ZeroStep",
    "route, ZeroStep, gather in forward",
    "two ZeroSteps",
    "hook_then_optimizer",
    "ClipGradNorm, ZeroStep",
    "LocalSGD, outer, overlapped, few bits",
    "AllReduce, Step, offloaded",
    "ZeroStep, deferred, unused",
    "ZeroStep, Join",
    "AllReduce, Step, Join, lengths unknown",
    "ZeroStep, automatic, deferred",
}
_ON_CPU = {
    "parity at 4 ranks: ZeroStep, gather in forward",
    "memory: offloaded activations",
    "times: a timeline",
    "times: a simulated link",
    *(f"{topic}: {chain}" for chain in _CHAINS_ON_CPU for topic in ("parity", "races")),
}
_CHOSEN = sorted(
    (check for check in checks() if _DEVICE == "cuda" or check.name in _ON_CPU), key=lambda check: check.world
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(_DEVICE) as runner:
        yield runner


@pytest.mark.parametrize("check", _CHOSEN, ids=lambda check: check.name)
def test_check(check: Check, runner: Runner) -> None:
    result = runner.run(check)
    assert result.outcome == "passed", f"{result.outcome}: {result.detail}"


def test_names_are_unique_and_those_chosen_are_there() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert set(names) >= _ON_CPU


def test_every_chain_is_checked_in_every_way_that_fits_it() -> None:
    from .chains import CHAINS

    names = {check.name for check in checks()}
    for name, chain in CHAINS.items():
        topics = {"parity", "races", "sanitizer"} | (set() if chain.join else {"host waits"})
        assert names >= {f"{topic}: {name}" for topic in topics}
