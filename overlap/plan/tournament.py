"""What is faster than plain DDP, found in the time that there is: challengers in turn, the faster one stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from overlap.errors import ConfigurationError
from overlap.plan.candidates import Candidate
from overlap.plan.decision import ENOUGH_ROUNDS, FEWEST_ROUNDS, Evidence
from overlap.plan.race import Race, round_ms, warm_up_ms

__all__ = ["tournament"]

_MOST_TRIED = 6
# In which a challenger is compared with the best so far; fewer where the logarithms of their times are so far apart.
_HEAT_ROUNDS, _CLEAR = 3, 0.12


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

    def challengers() -> Iterator[Candidate]:
        yield from firsts.values()
        if best is not None:
            yield from (one for one in others if one.method == best.method and one != firsts[one.method])

    for tried, challenger in enumerate(challengers()):
        steps_ms = {**predicted_ms, **race.steps_ms}
        if tried == _MOST_TRIED or _needed_s(plain, best, challenger, steps_ms) > left_s():
            break
        if not race.steps_ms and not race.add(plain):
            raise ConfigurationError(f"plain DDP refuses this model: {race.refused[plain]}")
        if not race.add(challenger):
            continue
        if best is None:
            best = challenger
            continue
        for _ in range(_HEAT_ROUNDS):
            race.run(1)
            evidence = Evidence(race.samples, predicted_ms)
            ahead = evidence.belief(challenger).log_ratio - evidence.belief(best).log_ratio
            if abs(ahead) > _CLEAR:
                break
        race.drop(best if ahead < 0 else challenger)
        best = challenger if ahead < 0 else best
    if best is not None:
        race.run_for(left_s)


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
