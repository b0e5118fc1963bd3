"""One row of the table: all forms in one world, beside the framework without us."""

from collections.abc import Callable
from typing import Any

from comparing import prepare_rank
from features import FRAMEWORKS, PLAIN, ROUNDED, Refused

from harness import assert_parity, run_ranks
from overlap import OverlapError

Play = Callable[[str, str, str], Any]


def _on_rank(rank: int, world_size: int, play: Play, feature: str, forms: list[str], folder: str) -> dict[str, Any]:
    prepare_rank(rank, world_size)
    found: dict[str, Any] = {}
    for form in forms:
        try:
            found[form] = play(feature, form, folder)
        except OverlapError as error:
            found[form] = error
    return found


def check_row(framework: str, feature: str, play: Play, folder: Any) -> None:
    """Play all forms of a row, and compare each with what it is to equal.

    ``play(feature, form, folder)`` returns what is compared, and for ``"plain"`` the same without us; where a form is
    to equal something else, such as an uninterrupted run of its own, a pair of both.
    """
    declared = FRAMEWORKS[framework][feature]
    forms = [*(["plain"] if {PLAIN, ROUNDED} & {c for c in declared.values() if isinstance(c, str)} else []), *declared]
    ranks = run_ranks(_on_rank, 2, play, feature, forms, str(folder), timeout_s=120)
    for rank, found in enumerate(ranks):
        for form, cell in declared.items():
            got, where = found[form], f"{framework}, {feature}, {form}, rank {rank}"
            if isinstance(cell, Refused):
                assert isinstance(got, OverlapError), f"{where} was not refused"
                assert cell.message in str(got), f"{where}: {got}"
                continue
            if isinstance(got, OverlapError):
                raise AssertionError(where) from got
            if cell in (PLAIN, ROUNDED):
                expected = _without_more(found["plain"], got)
            else:
                got, expected = got
            # Adam divides by the size of a gradient, and so makes more of what small ones were rounded by.
            rounded = {"rtol": 1e-3, "atol": 1e-5, "reason": ROUNDED} if cell == ROUNDED else {}
            assert_parity(got, expected, what=where, **rounded)


def _without_more(plain: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """A divided state is whole on rank 0 alone."""
    assert got["model"] and "losses" in got
    return {key: value for key, value in plain.items() if key in got or key not in ("state", "lr")}
