"""Faults in how the library uses streams, each of which a scenario must find.

A mutant is a piece of the library's source, what stands in its place, and the scenario that finds it. Where the piece
is no longer there, the mutant says so: give it the line that does the same now, or drop it.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Mutant:
    """In the function or method ``where`` (``module:Class.method``) every ``before`` becomes ``after``."""

    where: str
    before: str
    after: str
    scenario: str
    found_as: str = "race"
    in_ranks: bool = False
    """Whether it takes two ranks that differ."""


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Within it the library has the fault."""
    module, _, path = mutant.where.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"overlap.{module}")
    for each in owners:
        owner = getattr(owner, each)
    with mock.patch.object(owner, name, _rewritten(vars(owner)[name], mutant)):
        yield


def _rewritten(found: Any, mutant: Mutant) -> Any:
    function: FunctionType = inspect.unwrap(found.fget if isinstance(found, property) else found)
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.before in source, f"{mutant.where} has no {mutant.before!r} any longer"
    # On the lines of the original, so that reports name them.
    padded = "\n" * (function.__code__.co_firstlineno - 1) + source.replace(mutant.before, mutant.after)
    code = compile(
        padded, function.__code__.co_filename, "exec", __future__.annotations.compiler_flag, dont_inherit=True
    )
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    return namespace[function.__name__]


def _without(where: str, line: str, scenario: str, found_as: str = "race", *, in_ranks: bool = False) -> Mutant:
    return Mutant(where, line, "pass", scenario, found_as, in_ranks)


def _waiting(where: str, asks: str, answer: str, scenario: str) -> Mutant:
    """The host is made to wait, as it may on the CPU."""
    return Mutant(where, asks, answer, scenario, "the host waits")


_FREED = "use after free"
_FORWARD = "sharded, in the next forward"
_FEEDBACK = "4 bits, feedback, interleaved"
_BEGIN = "self._stream.wait_event(self._event)"
_JOIN = "(self._caller or current_stream(self._device)).wait_event(self._event)"
_ENGINE, _OPTIM = "hooks.engine", "optim"

MUTANTS: dict[str, Mutant] = {
    # The engine.
    "stages do not wait for gradients": _without(
        f"{_ENGINE}.executors:StreamExecutor.submit", _BEGIN, "all-reduce, interleaved"
    ),
    "what is begun between passes waits for nothing": _without(
        f"{_ENGINE}.executors:StreamExecutor.submit", _BEGIN, "sharded, deferred, in the next forward"
    ),
    "nobody waits for what is run at once": _without(f"{_ENGINE}.executors:StreamExecutor.join", _JOIN, "local"),
    "a replay ends before its stages": _without(
        f"{_ENGINE}.wavefront:BackwardPass.wait", "self.executor.join()", "joins, 4 bits", in_ranks=True
    ),
    "a failed pass ends before its stages": _without(
        f"{_ENGINE}.wavefront:BackwardPass.fail", "self.executor.join()", "fails in backward"
    ),
    "a collective that was given up is not waited for": _without(
        f"{_ENGINE}.executors:StreamExecutor.abandon", "operation.abandon(self.wait)", "fails in a stage"
    ),
    "a collective is not waited for": _without(
        "hooks.collectives:Collective.finish", "wait(work)", "all-reduce, interleaved"
    ),
    "DDP's future has no device": Mutant(
        f"{_ENGINE}.executors:StreamExecutor.new_future",
        "future_for(self._device)",
        "__import__('torch').futures.Future()",
        "a hook of DDP's own",
    ),
    "DDP does not wait for the stages": _without(
        f"{_ENGINE}.runtime:Runtime.on_bucket", "after_gradients(executor.join)", "all-reduce, no update"
    ),
    "a hook's future is not waited for": Mutant(
        "hooks.collectives:FutureResult.finish", "self._future.wait()", "self._future.value()", "a hook, no update"
    ),
    # Gathers that ride into the next forward, averages that ride beside steps.
    "background work records no event": _without(
        f"{_ENGINE}.wavefront:Completion.set", "self._event = recorded_event(self._device)", _FORWARD
    ),
    "nobody waits for background work": _without(
        f"{_ENGINE}.wavefront:Completion.wait",
        "current_stream(self._device).wait_event(self._event)",
        "local, overlapped",
    ),
    "readers do not wait for a gather": _without(
        f"{_OPTIM}.zero.prefetch:ParameterPrefetch.wait_for", "completion.wait()", _FORWARD
    ),
    "what is left of the gathers is not waited for": _without(
        f"{_OPTIM}.zero.prefetch:ParameterPrefetch.wait", "self.wait_for(self._completions)", _FORWARD
    ),
    "an average lands before it is there": _without(
        f"{_OPTIM}.local_sgd.means:Running.wait", "completion.wait()", "local, overlapped"
    ),
    # Gradients that are released.
    "a released bucket goes before the stages' stream is done with it": _without(
        f"{_OPTIM}.release:_Memory.empty_if_idle", "self._allocation[0].wait_event(self._last_use)", "released", _FREED
    ),
    "a bucket is written before it has memory": _without(
        f"{_OPTIM}.release:GradientRelease.before_gradient",
        "memory.wait_until_allocated()",
        "released, on two streams",
    ),
    # Waits of the host.
    "the host looks whether feedback is finite": _waiting(
        f"{_ENGINE}.runtime:Runtime.discard", "has_streams(found_inf.device)", "False", _FEEDBACK
    ),
    "the host looks whether factors are finite": _waiting(
        "hooks.powersgd.algorithm:PowerIteration._settle",
        "has_streams(last.flat.device)",
        "False",
        "factors, interleaved",
    ),
    "the host looks whether a step is left out": _waiting(
        f"{_OPTIM}.stepper:FoundInf.skips", "has_streams(self.found_inf.device)", "False", "log, skip"
    ),
    "the host looks whether shards are finite": _waiting(
        f"{_OPTIM}.zero.step:ZeroStep._mark_verdict",
        "has_streams(found_inf.device) or ",
        "",
        "sharded, deferred",
    ),
}
