"""From predictions and samples to a choice. Nothing is measured here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlap.errors import ConfigurationError
from overlap.plan.candidates import METHODS, PLAIN, Candidate
from overlap.plan.plan import Plan, Row
from overlap.plan.predict import Prediction

__all__ = ["ENOUGH_ROUNDS", "FEWEST_ROUNDS", "Belief", "Evidence", "Options", "Samples"]

Samples = Mapping[Candidate, Sequence[float | None]]
"""Ms a step, round by round; None where a candidate was not in the race. Plain DDP was in all."""

_PLAIN = Candidate(PLAIN)
# What is predicted to be slower than plain DDP by more than this is not raced.
_HOPELESS = 1.3
# By how much a candidate must be faster than plain DDP to take its place: in doubt plain DDP stays.
_MARGIN = 0.02
# How sure that must be, as quantiles of the normal distribution: by all that is known 99 %, by what was measured alone
# 97.5 %, and where there was no time to race 84 %.
_SURE, _SURE_ALONE, _SURE_UNRACED = 2.3263, 1.96, 1.0
# A race of fewer rounds shows nothing, since another process may disturb one; of so many it is planned.
FEWEST_ROUNDS, ENOUGH_ROUNDS = 2, 5
# By how much the logarithm of a predicted ratio is off, and by how many ms of a step besides.
_PREDICTED, _PREDICTED_MS = 0.1, 10.0
# The spread of measured ones, before any is known, and how many rounds that counts as.
_SPREAD, _SPREAD_COUNTS = 0.12, 4
# An eighth is trimmed at each end.
_TRIMMED = 8
_EARLY = (
    " It updates in backward: a loop that clips, scales or skips between backward and step, or runs several backwards "
    "a step, needs updates='step'."
)


@dataclass(frozen=True)
class Options:
    """What may be chosen from."""

    predictions: tuple[Prediction, ...]
    """The fastest first."""
    notes: Mapping[Candidate, str]
    """Which may not be chosen, and why."""

    @classmethod
    def of(
        cls, predictions: Sequence[Prediction], *, memory: str | int | None, obstacles: Mapping[str, str]
    ) -> Options:
        """Those that fit.

        Args:
            predictions: plain DDP's among them.
            memory: of :func:`overlap.auto`.
            obstacles: the methods that the optimizer rules out, and why.

        Raises:
            ConfigurationError: nothing fits into ``memory``.
        """
        plain = next(one for one in predictions if one.candidate.is_plain)
        notes: dict[Candidate, str] = {}
        for one in predictions:
            if one.candidate.method in obstacles:
                notes[one.candidate] = obstacles[one.candidate.method]
            elif memory == "small" and one.memory_bytes >= plain.memory_bytes:
                notes[one.candidate] = "takes no less memory than plain DDP"
            elif isinstance(memory, int) and one.memory_bytes > memory:
                notes[one.candidate] = "takes more memory than allowed"
        if len(notes) == len(predictions):
            least = min(predictions, key=lambda one: one.memory_bytes)
            sharded = [one.candidate for one in predictions if METHODS[one.candidate.method].is_sharded]
            why = "" if sharded else "; a sharded optimizer takes less, if allow names 'sharded'"
            why = next((f" ({obstacles[one.method]})" for one in sharded if one.method in obstacles), why)
            raise ConfigurationError(
                f"memory={memory!r} leaves nothing to choose: {least.candidate} takes least, about "
                f"{least.memory_bytes} bytes{why}; give more, or None"
            )
        return cls(tuple(predictions), notes)

    def order(self) -> list[tuple[str, float | None, float]]:
        """Method, bucket size and predicted time of plain DDP, then of what to race against it, in this order.

        That of the ideal times: how much computing and sending slow each other down is the least certain of what was
        measured, and a race finds out what hides most.
        """
        plain = self._prediction(_PLAIN)
        limit_ms = float("inf") if _PLAIN in self.notes else _HOPELESS * plain.step_ms
        others = [one for one in self.predictions if one.candidate not in self.notes and one.step_ms <= limit_ms]
        return [
            (one.candidate.method, one.candidate.bucket_cap_mb, one.step_ms)
            for one in (plain, *sorted((one for one in others if one is not plain), key=lambda one: one.ideal_ms))
        ]

    def decide(
        self,
        samples: Samples,
        refused: Mapping[Candidate, str],
        *,
        ranks: int,
        compute: str,
        link: str,
        seconds: float,
    ) -> Plan:
        """The plan.

        Args:
            samples: ms a step of what was raced, round by round; plain DDP's among them, or none at all.
            refused: what took no step, and why: other sizes of buckets will not help it.
            ranks: how many.
            compute: the computation in words.
            link: the link in words.
            seconds: how long it took.
        """
        of_method = {name.method: why for name, why in refused.items() if name.method != PLAIN}
        late = {p.candidate: of_method[p.candidate.method] for p in self.predictions if p.candidate.method in of_method}
        notes = {**self.notes, **late, **refused}
        allowed = [one for one in self.predictions if one.candidate not in notes]
        if not allowed:
            words = next(iter(refused.values()))
            raise ConfigurationError(f"nothing that may be chosen takes this model: {words}")
        evidence = Evidence(samples, self._predicted_ms)
        chosen = evidence.best(
            [name for name in samples or self._predicted_ms if name not in notes], plain_is_allowed=_PLAIN not in notes
        )
        if chosen in notes:
            words = next(iter(refused.values()), notes[chosen])
            raise ConfigurationError(f"nothing that may be chosen and was raced takes this model: {words}")
        return Plan(
            method=chosen.method,
            bucket_cap_mb=chosen.bucket_cap_mb,
            ranks=ranks,
            rows=_rows(self.predictions, samples, notes),
            reason=self._reason(chosen, samples, notes, refused, seconds),
            compute=compute,
            link=link,
            seconds=round(seconds, 2),
        )

    @property
    def _predicted_ms(self) -> dict[Candidate, float]:
        return {one.candidate: one.step_ms for one in self.predictions}

    def _prediction(self, candidate: Candidate) -> Prediction:
        return next(one for one in self.predictions if one.candidate == candidate)

    def _reason(
        self,
        chosen: Candidate,
        samples: Samples,
        notes: Mapping[Candidate, str],
        refused: Mapping[Candidate, str],
        spent_s: float,
    ) -> str:
        others = [name for name in samples if name != _PLAIN]
        no_race = "" if others else self._no_race(notes, spent_s)
        if chosen == _PLAIN:
            if not others and refused and not no_race:
                return "Plain DDP stays: what was to race against it does not take this model."
            evidence = Evidence(samples, self._predicted_ms)
            if not others:
                return (
                    "Plain DDP stays: nothing is predicted to be faster by so much that it would be sure without a "
                    f"race.{no_race}"
                )
            best = min(others, key=lambda name: evidence.belief(name).log_ratio)
            belief, ratios = evidence.belief(best), _ratios(samples, best)
            return (
                f"Plain DDP stays: the best of the others, {best}, took {_ratio(samples, best):.3f} of its step and "
                f"won {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rounds. With the prediction that is "
                f"{math.exp(belief.log_ratio):.3f}, and faster with {belief.probability:.0%}; at most "
                f"{1 - _MARGIN:.2f} and 99% are asked, and 97% by what was measured alone."
            )
        if chosen in samples:
            against = f"took {_ratio(samples, chosen):.3f} of plain DDP's step in the race"
        else:
            predicted = self._prediction(chosen).step_ms / self._prediction(_PLAIN).step_ms
            against = f"is predicted to take {predicted:.3f} of plain DDP's step"
        limits = f"; plain DDP {notes[_PLAIN]}" if _PLAIN in notes else ""
        early = "" if METHODS[chosen.method].is_deferred else _EARLY
        return f"{chosen} was chosen: it {against}{limits}.{no_race}{early}"

    def _no_race(self, notes: Mapping[Candidate, str], spent_s: float) -> str:
        """How long choosing must take for a race against one other, whose samples may take two steps; empty if all
        others are ruled out."""
        if all(Candidate(method, size) in notes for method, size, _ in self.order()[1:]):
            return ""
        race_s = 3e-3 * (ENOUGH_ROUNDS + 1) * self._prediction(_PLAIN).step_ms
        return f" There was no time for a race of such long steps; seconds={math.ceil(spent_s + race_s)} gives it."


class Belief(NamedTuple):
    """What a step takes over plain DDP's: a normal distribution of the logarithm."""

    log_ratio: float
    error: float

    def bound(self, quantile: float) -> float:
        """Where the ratio's logarithm is surely below."""
        return self.log_ratio + quantile * self.error

    @property
    def probability(self) -> float:
        """That a step is shorter than plain DDP's."""
        return 0.5 * (1 - math.erf(self.log_ratio / self.error / math.sqrt(2)))


class Evidence:
    """What predictions and a race say together, each by how exact it is.

    The logarithm of a predicted ratio is off by 0.1, and by 10 ms of the step: measured for the rows of the benchmark,
    see ``docs/auto.md``. That of a measured one has the spread of the rounds, taken from all candidates together, since
    a few rounds of one say little of it. Before the first it is taken to be 0.12, which counts as much as four rounds.

    Args:
        samples: of what was raced, plain DDP among it; or none.
        predicted_ms: a step of each candidate, plain DDP among them. What is not there has only been measured.
    """

    def __init__(self, samples: Samples, predicted_ms: Mapping[Candidate, float]) -> None:
        self._predicted_ms = predicted_ms
        self._left = {name for name, times in samples.items() if times[-1] is None}
        self._logs = {name: _Logs.of(_ratios(samples, name)) for name in samples if name != _PLAIN}
        squares, count = _SPREAD**2 * _SPREAD_COUNTS, _SPREAD_COUNTS
        for logs in self._logs.values():
            squares += logs.squares
            count += max(logs.count - 1, 0)
        self._spread = math.sqrt(squares / count)

    def predicted(self, name: Candidate) -> Belief | None:
        """What the prediction says."""
        if name not in self._predicted_ms:
            return None
        plain_ms = self._predicted_ms[_PLAIN]
        return Belief(math.log(self._predicted_ms[name] / plain_ms), _PREDICTED + _PREDICTED_MS / plain_ms)

    def measured(self, name: Candidate) -> Belief | None:
        """What the race says."""
        logs = self._logs.get(name)
        return None if logs is None or not logs.count else Belief(logs.mean, self._spread * logs.error)

    def belief(self, name: Candidate) -> Belief:
        """Both together."""
        known = [one for one in (self.predicted(name), self.measured(name)) if one is not None]
        weights = [1 / one.error**2 for one in known]
        mean = sum(weight * one.log_ratio for weight, one in zip(weights, known, strict=True)) / sum(weights)
        return Belief(mean, 1 / math.sqrt(sum(weights)))

    def is_surely_faster(self, name: Candidate) -> bool:
        """Whether it may take plain DDP's place."""
        belief, measured = self.belief(name), self.measured(name)
        if belief.log_ratio > math.log(1 - _MARGIN):
            return False
        if measured is None:
            return belief.bound(_SURE_UNRACED) < 0
        is_enough = self._logs[name].count >= FEWEST_ROUNDS
        return is_enough and belief.bound(_SURE) < 0 and measured.bound(_SURE_ALONE) < 0

    def best(self, names: Iterable[Candidate], *, plain_is_allowed: bool = True) -> Candidate:
        """The fastest of ``names``: plain DDP unless another is surely faster, or it is not allowed.

        What has left a race was slower than what stayed; its few rounds may have been lucky ones.
        """
        others = [name for name in names if name != _PLAIN and name not in self._left]
        if plain_is_allowed:
            others = [name for name in others if self.is_surely_faster(name)]
        return min(others, key=lambda name: self.belief(name).log_ratio, default=_PLAIN)


@dataclass(frozen=True)
class _Logs:
    """Of the logarithms of ratios, round by round.

    Of eight or more the lowest and the highest eighth are left out, by the method of Tukey and McLaughlin (1963): a
    round that another process has disturbed would hide what all the others show.
    """

    count: int
    mean: float
    squares: float
    """The sum of squared differences from their mean."""
    error: float
    """Of :attr:`mean`, as a part of the spread."""

    @classmethod
    def of(cls, ratios: Sequence[float]) -> _Logs:
        logs = sorted(math.log(ratio) for ratio in ratios)
        count, cut = len(logs), len(logs) // _TRIMMED
        if not count:
            return cls(0, 0.0, 0.0, math.inf)
        kept = logs[cut : count - cut]
        winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
        center = statistics.fmean(winsorized)
        squares = sum((one - center) ** 2 for one in winsorized)
        return cls(count, statistics.fmean(kept), squares, math.sqrt(count) / len(kept))


def _ratios(samples: Samples, name: Candidate) -> list[float]:
    """To plain DDP, of the rounds in which ``name`` was in the race."""
    pairs = zip(samples[name], samples[_PLAIN], strict=True)
    return [ms / plain_ms for ms, plain_ms in pairs if ms is not None and plain_ms is not None]


def _ratio(samples: Samples, name: Candidate) -> float:
    return statistics.median(_ratios(samples, name))


def _median_ms(times: Sequence[float | None]) -> float:
    return statistics.median(ms for ms in times if ms is not None)


def _rows(
    predictions: Sequence[Prediction],
    samples: Samples,
    notes: Mapping[Candidate, str],
) -> tuple[Row, ...]:
    """What was measured first, each part with the fastest first."""
    rows = [
        Row(
            method=one.candidate.method,
            bucket_cap_mb=one.candidate.bucket_cap_mb,
            kind=METHODS[one.candidate.method].kind,
            update=METHODS[one.candidate.method].update,
            predicted_ms=round(one.step_ms, 4),
            measured_ms=round(_median_ms(samples[one.candidate]), 4) if one.candidate in samples else None,
            sent_bytes=one.sent_bytes,
            memory_bytes=one.memory_bytes,
            note=notes.get(one.candidate, ""),
        )
        for one in predictions
    ]
    return tuple(sorted(rows, key=lambda row: (row.measured_ms is None, row.measured_ms or row.predicted_ms)))
