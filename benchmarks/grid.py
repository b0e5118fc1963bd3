"""A table of cells, one for each model, link and number of ranks, which can be measured in parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["measure", "parser", "write"]


def parser(description: str | None, *, links: list[str]) -> argparse.ArgumentParser:
    """The options that every grid has; `links` are measured where none are named."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", default=["resnet18", "transformer", "mlp"])
    made.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    made.add_argument("--links", nargs="+", default=links, help="speeds, or loopback")
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--again", action="store_true", help="measure cells that are there already")
    made.add_argument("--into", type=Path, help="the page to write the table into")
    made.add_argument("--rank-task", help=argparse.SUPPRESS)
    return made


def measure(
    options: argparse.Namespace,
    results: Path,
    cell_of: Callable[[str, int, str | None], dict[str, Any]],
    in_words: Callable[[dict[str, Any]], str],
    *,
    suffix: str = "",
) -> dict[str, Any]:
    """Measure the cells that the file `results` lacks (all with `--again`), and return all that it has then.

    `cell_of` is given the model, the number of ranks and the link's speed, `None` for loopback. `suffix` ends the names
    of cells that are measured in another way.
    """
    cells: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for model in options.models:
        for link in options.links:
            for ranks in options.ranks:
                name = f"{model}, {ranks} ranks, {link}{suffix}"
                if name in cells and not options.again:
                    continue
                cells[name] = cell_of(model, ranks, None if link == "loopback" else link)
                results.write_text(json.dumps(cells, indent=1) + "\n")
                print(f"{name}: {in_words(cells[name])}", flush=True)
    return cells


def write(text: str, into: Path | None, *, begin: str, end: str) -> None:
    """Print `text`, and put it between two comments of a page, if one is given."""
    print(text)
    if into is not None:
        before, _, rest = into.read_text().partition(begin)
        into.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
