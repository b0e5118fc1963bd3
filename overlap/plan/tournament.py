"""What is faster than plain DDP, found in the time that there is: challengers in turn, the faster one stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from overlap.errors import ConfigurationError
from overlap.plan.candidates import Candidate
from overlap.plan.decision import ENOUGH_ROUNDS, FEWEST_ROUNDS, Evidence
from overlap.plan.race import Race, round_ms, warm_up_ms

__all__ = ["tournament"]

_MOST_TRIED = 6
# In which a challenger is compared with the best so far: fewer if they are so many standard errors apart; more if they
# are not, up to its share of this part of the time that is left.
_HEAT_ROUNDS, _CLEAR, _HEATS_SHARE = 3, 1.5, 0.5


def tournament(
    race: Race, plain: Candidate, predicted_ms: Mapping[Candidate, float], *, left_s: Callable[[], float]
) -> None:
    """Fill the samples of ``race``, or leave them empty if the time is too short; all ranks call the same.

    A challenger runs beside plain DDP and the best so far, of which the slower one then leaves, so there are never more
    than three copies of the model. First come the methods, each with its best bucket size, then other sizes of the
    method that won. What is left of the time goes to plain DDP and the winner.

    Args:
        race: without lanes; those that it has at the end are left to the caller.
        plain: what all are compared with.
        predicted_ms: a step of each candidate, plain DDP among them, in the order in which they are tried.
        left_s: how many seconds are left, the same on all ranks; all of them call it.
    """
    others = [candidate for candidate in predicted_ms if candidate != plain]
    firsts: dict[str, Candidate] = {}
    for one in others:
        firsts.setdefault(one.method, one)
    best: Candidate | None = None
    tried: list[Candidate] = []

    def waiting() -> list[Candidate]:
        sizes = [one for one in others if best is not None and one.method == best.method]
        untried = [one for one in dict.fromkeys([*firsts.values(), *sizes]) if one not in tried]
        return untried[: _MOST_TRIED - len(tried)]

    while challengers := waiting():
        challenger = challengers[0]
        if _needed_s(plain, best, challenger, {**predicted_ms, **race.steps_ms}) > left_s():
            break
        if not race.steps_ms and not race.add(plain):
            raise ConfigurationError(f"plain DDP refuses this model: {race.refused[plain]}")
        tried.append(challenger)
        if not race.add(challenger):
            continue
        if best is None:
            best = challenger
            continue
        if _is_faster(race, challenger, best, predicted_ms, left_s=left_s, heats=len(challengers)):
            best, challenger = challenger, best
        race.drop(challenger)
    if best is not None:
        race.run_for(left_s)


def _is_faster(
    race: Race,
    challenger: Candidate,
    best: Candidate,
    predicted_ms: Mapping[Candidate, float],
    *,
    left_s: Callable[[], float],
    heats: int,
) -> bool:
    """Whether ``challenger`` is faster than ``best``, in the first of ``heats`` that are still to come."""
    rounds, start_s = 0, left_s()
    now_s, until_s = start_s, start_s * (1 - _HEATS_SHARE / heats)
    # As long as one more round, as long as those before, ends in time.
    while rounds < _HEAT_ROUNDS or now_s - (start_s - now_s) / rounds > until_s:
        race.run(1)
        rounds, now_s = rounds + 1, left_s()
        evidence = Evidence(race.samples, predicted_ms)
        one, other = evidence.belief(challenger), evidence.belief(best)
        if abs(one.log_ratio - other.log_ratio) > _CLEAR * math.hypot(one.error, other.error):
            break
    return one.log_ratio < other.log_ratio


def _needed_s(
    plain: Candidate, best: Candidate | None, challenger: Candidate, steps_ms: Mapping[Candidate, float]
) -> float:
    """What it takes to try ``challenger``, and then to compare the better one with plain DDP."""
    of_round = {one: round_ms(one, steps_ms[one]) for one in (plain, challenger, best) if one is not None}
    warm_ms = warm_up_ms(steps_ms[challenger])
    if best is None:
        return 1e-3 * (warm_up_ms(steps_ms[plain]) + warm_ms + FEWEST_ROUNDS * sum(of_round.values()))
    final_ms = (ENOUGH_ROUNDS - _HEAT_ROUNDS) * (of_round[plain] + max(of_round[challenger], of_round[best]))
    return 1e-3 * (warm_ms + _HEAT_ROUNDS * sum(of_round.values()) + final_ms)
