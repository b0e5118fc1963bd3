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

__all__ = ["ENOUGH_ROUNDS", "FEWEST_ROUNDS", "Options", "best_of"]

_PLAIN = Candidate(PLAIN)
# What is predicted to be slower than plain DDP by more than this is not raced.
_HOPELESS = 1.3
# By how much a candidate must be faster than plain DDP to take its place: in doubt plain DDP stays.
_MARGIN = 0.02
# Of that many rounds and more, the mean must besides be below 1 by a one-sided bound of 99 %, a normal quantile of
ENOUGH_ROUNDS, _QUANTILE = 5, 2.3263
# With fewer every round must show it, and the prediction must say the same. One round alone shows nothing.
FEWEST_ROUNDS, _MARGIN_OF_FEW = 2, 0.15
# By how much where there was no time to race, and the predictions alone are compared.
_MARGIN_UNRACED = 0.05
_EARLY = (
    " It updates in backward: a loop that clips, scales or skips between backward and step, or runs several backwards "
    "a step, needs updates='step'."
)
# Of the rounds, how many it must have won.
_WON = 0.75


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
        """Method, bucket size and predicted time of plain DDP, then of what to race against it, the best first."""
        plain = self._prediction(_PLAIN)
        limit_ms = float("inf") if _PLAIN in self.notes else _HOPELESS * plain.step_ms
        others = [one for one in self.predictions if one.candidate not in self.notes and one.step_ms <= limit_ms]
        return [
            (one.candidate.method, one.candidate.bucket_cap_mb, one.step_ms)
            for one in (plain, *(one for one in others if one is not plain))
        ]

    def decide(
        self,
        samples: Mapping[Candidate, Sequence[float]],
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
            reason=self._reason(chosen, samples, notes),
            compute=compute,
            link=link,
            seconds=round(seconds, 2),
        )

    def _prediction(self, candidate: Candidate) -> Prediction:
        return next(one for one in self.predictions if one.candidate == candidate)

    def _reason(
        self, chosen: Candidate, samples: Mapping[Candidate, Sequence[float]], notes: Mapping[Candidate, str]
    ) -> str:
        others = [name for name in samples if name != _PLAIN]
        if chosen == _PLAIN:
            if samples and not others:
                return "Plain DDP stays: what was raced against it does not take this model."
            if not others:
                return f"Plain DDP stays: nothing is predicted to be faster by {_MARGIN_UNRACED:.0%} or more."
            best = min(others, key=lambda name: _ratio(samples, name))
            rounds = len(samples[best])
            won = sum(ms < plain_ms for ms, plain_ms in zip(samples[best], samples[_PLAIN], strict=True))
            asked = f"at most {1 - _MARGIN:.2f}, {_WON:.0%} of them and more than the ratios' spread are asked"
            if rounds < ENOUGH_ROUNDS:
                asked = (
                    f"with less than {ENOUGH_ROUNDS} all and the prediction must be at most {1 - _MARGIN_OF_FEW:.2f}"
                )
            return (
                f"Plain DDP stays: the best of the others, {best}, took {_ratio(samples, best):.3f} of its step and "
                f"won {won} of {rounds} rounds; {asked}."
            )
        if chosen in samples:
            against = f"took {_ratio(samples, chosen):.3f} of plain DDP's step in the race"
        else:
            predicted = self._prediction(chosen).step_ms / self._prediction(_PLAIN).step_ms
            against = f"is predicted to take {predicted:.3f} of plain DDP's step; it was not raced"
        limits = f"; plain DDP {notes[_PLAIN]}" if _PLAIN in notes else ""
        early = "" if METHODS[chosen.method].is_deferred else _EARLY
        return f"{chosen} was chosen: it {against}{limits}.{early}"


def best_of(
    samples: Mapping[Candidate, Sequence[float]],
    *,
    predicted: Mapping[Candidate, float] | None = None,
    plain_is_allowed: bool = True,
) -> Candidate:
    """The fastest of what was raced; plain DDP unless another is surely faster.

    That takes a median of the ratios, round by round, at least 2 % below 1, three quarters of the rounds won, and a
    mean whose upper bound is below 1: the more the ratios are spread, the lower it must be. With fewer than five rounds
    all ratios, and the predicted one, must be at least 15 % below 1. Where plain DDP is not allowed the fastest of the
    others is taken.

    Args:
        samples: ms a step, round by round.
        predicted: step times over plain DDP's.
        plain_is_allowed: whether it may be chosen.
    """
    predicted = predicted or {}
    ratios = {name: _ratio(samples, name) for name in samples if name != _PLAIN}
    if plain_is_allowed:
        ratios = {name: one for name, one in ratios.items() if _is_surely_faster(samples, name, predicted.get(name, 1))}
    return min(ratios, key=lambda name: ratios[name], default=_PLAIN)


def _is_surely_faster(samples: Mapping[Candidate, Sequence[float]], name: Candidate, predicted: float) -> bool:
    ratios = [ms / plain_ms for ms, plain_ms in zip(samples[name], samples[_PLAIN], strict=True)]
    if len(ratios) < FEWEST_ROUNDS:
        return False
    if len(ratios) < ENOUGH_ROUNDS:
        return max(*ratios, predicted) <= 1 - _MARGIN_OF_FEW
    won = sum(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) <= 1 - _MARGIN and won >= _WON * len(ratios) and _upper_bound(ratios) < 1


def _upper_bound(ratios: Sequence[float]) -> float:
    """Of the geometric mean, one-sided, by Student's t, whose quantile is expanded about the normal one."""
    logs, free, z = [math.log(ratio) for ratio in ratios], len(ratios) - 1, _QUANTILE
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return math.exp(statistics.fmean(logs) + quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def _ratio(samples: Mapping[Candidate, Sequence[float]], name: Candidate) -> float:
    return statistics.median(ms / plain for ms, plain in zip(samples[name], samples[_PLAIN], strict=True))


def _best_predicted(allowed: Sequence[Prediction], plain: Prediction) -> Candidate:
    best = allowed[0]
    if plain in allowed and best.step_ms > (1 - _MARGIN_UNRACED) * plain.step_ms:
        return _PLAIN
    return best.candidate


def _rows(
    predictions: Sequence[Prediction],
    samples: Mapping[Candidate, Sequence[float]],
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
            measured_ms=round(statistics.median(samples[one.candidate]), 4) if one.candidate in samples else None,
            sent_bytes=one.sent_bytes,
            memory_bytes=one.memory_bytes,
            note=notes.get(one.candidate, ""),
        )
        for one in predictions
    ]
    return tuple(sorted(rows, key=lambda row: (row.measured_ms is None, row.measured_ms or row.predicted_ms)))
