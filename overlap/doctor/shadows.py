"""Other packages called `overlap`, which may be imported in this one's place."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

__all__ = ["DISTRIBUTION", "installed_version", "other_distributions", "other_places"]

PACKAGE = "overlap"
DISTRIBUTION = "ddp-overlap"


def other_distributions() -> list[str]:
    """Distributions besides this one that install a package of its name, where one of them overwrites the other."""
    return sorted({name for name in packages_distributions().get(PACKAGE, []) if name != DISTRIBUTION})


def other_places() -> list[Path]:
    """Packages and modules of this name that Python can find, besides the one that runs, in the order of the search."""
    own = Path(__file__).resolve().parent.parent
    found = []
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or ".").resolve()
        for place in (folder / PACKAGE, folder / f"{PACKAGE}.py"):
            file = place if place.suffix == ".py" else place / "__init__.py"
            if file.is_file() and place.resolve() != own:
                found.append(place)
    return list(dict.fromkeys(found))


def installed_version() -> str | None:
    """The version of its metadata; None where it is not installed, as in a clone that is on the path."""
    try:
        return distribution(DISTRIBUTION).version
    except PackageNotFoundError:
        return None
