"""The table of loops and forms of update for the docs; ``python tests/loops`` writes it."""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .compare import is_as_expected, outcomes
from .corpus import Expected, Loop, load, topic_title
from .forms import FORMS, forms_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "loops.md"

_TOP = """# Ordinary training loops

`tests/loops` has {loops} training loops as users write them. Each is played with plain DDP and a plain optimizer, and
again from the same seeds with up to {forms} forms of update, on 2 ranks. Parameters, buffers, losses and the
optimizer's state are compared bit for bit at every step. Of {cells} cells {exact} are exact, {refused} are refused with
an error that says what to do, and {limits} are limits.

| cell | meaning |
| --- | --- |
| + | exact: the same in every bit |
| R*n* | refused: an error of the library's; how it begins is [below](#errors) |
| L*n* | limit: the result differs, or the form cannot play the loop; why is [below](#limits) |

The forms, for an optimizer `o` or, where its state is divided among the ranks, `zero`:

{legend}

- The loops are written with `zero_grad()`, which plain DDP needs and the other forms allow.
- Those of *automatic* and *hook* have no `step()`: backward makes the update.
- With *released* and *zero released* DDP has `gradient_as_bucket_view=True`.
- With *zero forward* parameters arrive during the next forward. Loops that read them elsewhere call `zero.wait()`
  first, as [zero.md](../zero.md) asks.

`python -m pytest tests/loops` plays all, and fails where a cell is not what it is declared to be.
`python tests/loops --play "step(closure)"` plays one loop or topic; `python tests/loops` writes this page. A new loop
takes about five lines, see [tests/loops/corpus.py](../../tests/loops/corpus.py).
"""


def page() -> str:
    """The page's text."""
    loops = load()
    errors = _Numbered("R", ending=" ...")
    limits = _Numbered("L")
    parts: list[str] = []
    for topic, group in itertools.groupby(loops.values(), key=lambda loop: loop.topic):
        names = [form.name for form in forms_of(topic)]
        parts += [f"\n## {topic_title(topic)}\n", f"| loop | {' | '.join(names)} |", f"| --- {'| :-: ' * len(names)}|"]
        parts += [_row(loop, {"refused": errors, "limit": limits}) for loop in group]
    played = [(loop, form.name) for loop in loops.values() for form in forms_of(loop.topic)]
    counts = Counter(loop.expected[form].kind for loop, form in played if form in loop.expected)
    cells = len(played)
    top = _TOP.format(
        loops=len(loops),
        forms=max(len(forms_of(loop.topic)) for loop in loops.values()),
        cells=cells,
        exact=cells - counts.total(),
        refused=counts["refused"],
        limits=counts["limit"],
        legend="\n".join(["| form | update |", "| --- | --- |", *(f"| {form.name} | {form.made} |" for form in FORMS)]),
    )
    parts += ["\n## Errors\n", "| mark | begins with |", "| --- | --- |", *errors.rows()]
    parts += ["\n## Limits\n", "| mark | why |", "| --- | --- |", *limits.rows()]
    return top + "\n".join(parts) + "\n"


class _Numbered:
    """Texts in the order of their first use, each with a number."""

    def __init__(self, letter: str, *, ending: str = "") -> None:
        self._letter, self._ending = letter, ending
        self._numbers: dict[str, str] = {}

    def mark(self, words: str) -> str:
        return self._numbers.setdefault(words, f"{self._letter}{len(self._numbers) + 1}")

    def rows(self) -> list[str]:
        return [f"| {number} | {words.rstrip()}{self._ending} |" for words, number in self._numbers.items()]


def _row(loop: Loop, texts: Mapping[str, _Numbered]) -> str:
    cells = [_cell(loop.expected.get(form.name), texts) for form in forms_of(loop.topic)]
    return f"| {loop.name} | {' | '.join(cells)} |"


def _cell(expected: Expected | None, texts: Mapping[str, _Numbered]) -> str:
    return "+" if expected is None else texts[expected.kind].mark(expected.words)


def _play(names: list[str]) -> int:
    """Plays loops and prints each cell that is not exact; returns how many are not as declared."""
    loops = {name: loop for name, loop in load().items() if name in names or loop.topic in names}
    faults = 0
    found = outcomes(loops)
    for (name, form), outcome in found.items():
        expected = loops[name].expected.get(form)
        is_fault = not is_as_expected(outcome, expected)
        faults += is_fault
        if is_fault or outcome.kind != "exact":
            print(f"{'FAULT' if is_fault else 'as declared'}: {name} | {form} | {outcome}")
    print(f"{len(loops)} loops, {len(found)} cells, {faults} not as declared")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="The table of loops and forms of update.")
    parser.add_argument("--play", nargs="+", metavar="LOOP", help="loops or topics to play")
    arguments = parser.parse_args()
    if arguments.play:
        return int(bool(_play(arguments.play)))
    PAGE.write_text(page())
    return 0
