"""From predictions and samples to a choice. Nothing is measured here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlap.errors import ConfigurationError
from overlap.plan.candidates import METHODS, PLAIN, Candidate
from overlap.plan.plan import Plan, Row
from overlap.plan.predict import Prediction

__all__ = ["ENOUGH_ROUNDS", "FEWEST_ROUNDS", "Options", "Samples", "best_of", "faster_of"]

Samples = Mapping[Candidate, Sequence[float | None]]
"""Ms a step, round by round; None where a candidate was not in the race. Plain DDP was in all."""

_PLAIN = Candidate(PLAIN)
# What is predicted to be slower than plain DDP by more than this is not raced.
_HOPELESS = 1.3
# By how much a candidate must be faster than plain DDP to take its place: in doubt plain DDP stays.
_MARGIN = 0.02
# The mean must besides be below 1 by a one-sided bound of 99 %, a normal quantile of
_QUANTILE = 2.3263
# An eighth is trimmed at each end.
_TRIMMED = 8
# With fewer than ENOUGH_ROUNDS every one must be won. Two alone have no spread to speak of: both, and the prediction,
# must be at most 1 - _MARGIN_OF_TWO. One round shows nothing.
ENOUGH_ROUNDS, FEWEST_ROUNDS, _MARGIN_OF_TWO = 5, 2, 0.15
# By how much where there was no time to race, and the predictions alone are compared.
_MARGIN_UNRACED = 0.05
_EARLY = (
    " It updates in backward: a loop that clips, scales or skips between backward and step, or runs several backwards "
    "a step, needs updates='step'."
)
# Of the rounds, how many it must have won.
_WON = 2 / 3


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
        if samples:
            raced = {name: times for name, times in samples.items() if name not in notes or name == _PLAIN}
            plain_ms = self._prediction(_PLAIN).step_ms
            predicted = {one.candidate: one.step_ms / plain_ms for one in self.predictions}
            chosen = best_of(raced, predicted=predicted, plain_is_allowed=_PLAIN not in notes)
            if chosen in notes:
                words = next(iter(refused.values()), notes[chosen])
                raise ConfigurationError(f"nothing that may be chosen and was raced takes this model: {words}")
        else:
            chosen = _best_predicted(allowed, self._prediction(_PLAIN))
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
            if not others:
                return f"Plain DDP stays: nothing is predicted to be faster by {_MARGIN_UNRACED:.0%} or more.{no_race}"
            best = min(others, key=lambda name: (-len(_ratios(samples, name)), _ratio(samples, name)))
            ratios = _ratios(samples, best)
            asked = f"at most {1 - _MARGIN:.2f}, two thirds of them and more than the ratios' spread are asked"
            if len(ratios) < ENOUGH_ROUNDS:
                asked = f"at most {1 - _MARGIN:.2f}, all of them and more than the ratios' spread are asked"
            if len(ratios) == FEWEST_ROUNDS:
                asked = f"with two rounds both and the prediction must be at most {1 - _MARGIN_OF_TWO:.2f}"
            return (
                f"Plain DDP stays: the best of the others, {best}, took {_ratio(samples, best):.3f} of its step and "
                f"won {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rounds; {asked}."
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


def best_of(
    samples: Samples,
    *,
    predicted: Mapping[Candidate, float] | None = None,
    plain_is_allowed: bool = True,
) -> Candidate:
    """The fastest of what was raced; plain DDP unless another is surely faster.

    That takes a median of the ratios, round by round, at least 2 % below 1, two thirds of the rounds won (of fewer than
    five: all), and a mean whose upper bound is below 1: the more the ratios are spread, and the fewer they are,
    the lower it must be. With two rounds both ratios, and the predicted one, must be at least 15 % below 1. Where plain
    DDP is not allowed the fastest of the others is taken.

    Args:
        samples: of what was raced, plain DDP among it.
        predicted: step times over plain DDP's.
        plain_is_allowed: whether it may be chosen.
    """
    predicted = predicted or {}
    ratios = {name: _ratio(samples, name) for name in samples if name != _PLAIN}
    if plain_is_allowed:
        ratios = {name: one for name, one in ratios.items() if _is_surely_faster(samples, name, predicted.get(name, 1))}
    return min(ratios, key=lambda name: ratios[name], default=_PLAIN)


def faster_of(samples: Samples, one: Candidate, other: Candidate) -> Candidate:
    """By the rounds in which both were in the race; there is one."""
    pairs = [(a, b) for a, b in zip(samples[one], samples[other], strict=True) if a is not None and b is not None]
    return one if statistics.median(a / b for a, b in pairs) <= 1 else other


def _is_surely_faster(samples: Samples, name: Candidate, predicted: float) -> bool:
    ratios = _ratios(samples, name)
    if len(ratios) < FEWEST_ROUNDS:
        return False
    if len(ratios) == FEWEST_ROUNDS:
        return max(*ratios, predicted) <= 1 - _MARGIN_OF_TWO
    share = sum(ratio < 1 for ratio in ratios) / len(ratios)
    return (
        statistics.median(ratios) <= 1 - _MARGIN
        and share >= (_WON if len(ratios) >= ENOUGH_ROUNDS else 1)
        and _upper_bound(ratios) < 1
    )


def _upper_bound(ratios: Sequence[float]) -> float:
    """Of the trimmed geometric mean of three or more, one-sided, by Student's t.

    Of eight or more the lowest and the highest eighth are left out, by the method of Tukey and McLaughlin (1963): a
    round that another process has disturbed would hide what all the others show.
    """
    logs = sorted(math.log(ratio) for ratio in ratios)
    count, cut = len(logs), len(logs) // _TRIMMED
    kept = logs[cut : count - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorized) * math.sqrt(count) / len(kept)
    return math.exp(statistics.fmean(kept) + _student(len(kept) - 1) * error)


def _student(free: int) -> float:
    """The quantile of Student's t, expanded about the normal one; with two degrees of freedom it has a closed form."""
    z = _QUANTILE
    if free == 2:
        twice = math.erf(z / math.sqrt(2))
        return twice * math.sqrt(2 / (1 - twice**2))
    terms = (
        (z**3 + z) / (4 * free),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3),
    )
    return z + sum(terms)


def _ratios(samples: Samples, name: Candidate) -> list[float]:
    """To plain DDP, of the rounds in which ``name`` was in the race."""
    pairs = zip(samples[name], samples[_PLAIN], strict=True)
    return [ms / plain_ms for ms, plain_ms in pairs if ms is not None and plain_ms is not None]


def _ratio(samples: Samples, name: Candidate) -> float:
    return statistics.median(_ratios(samples, name))


def _median_ms(times: Sequence[float | None]) -> float:
    return statistics.median(ms for ms in times if ms is not None)


def _best_predicted(allowed: Sequence[Prediction], plain: Prediction) -> Candidate:
    best = allowed[0]
    if plain in allowed and best.step_ms > (1 - _MARGIN_UNRACED) * plain.step_ms:
        return _PLAIN
    return best.candidate


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
