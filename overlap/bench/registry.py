"""Every variant by name, and which of them a run needs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from overlap.bench.settings import Settings, SettingsError
from overlap.bench.variant import COMPUTE_ONLY, Variant
from overlap.bench.variants import averaging, compression, plain, uneven_inputs, updates

__all__ = ["choose", "registry", "with_baselines"]

# In the order of the table.
_MODULES = (plain, updates, compression, averaging, uneven_inputs)


@cache
def registry() -> dict[str, Variant]:
    """Every variant by name, in the order of the table."""
    found: dict[str, Variant] = {}
    for module in _MODULES:
        for one in vars(module).values():
            if isinstance(one, Variant):
                assert one.name not in found, f"two variants are called {one.name}"
                found[one.name] = one
    return found


def choose(settings: Settings, backend: str) -> tuple[str, ...]:
    """The variants to run: those asked for or all that fit `backend`, with the baselines they are compared to."""
    known = registry()
    unknown = [name for name in settings.variants if name not in known]
    if unknown:
        raise SettingsError(f"variants has {', '.join(unknown)}; known are {', '.join(known)}")
    asked = settings.variants or tuple(name for name, one in known.items() if backend in one.backends)
    return with_baselines(asked, settings)


def with_baselines(names: Iterable[str], settings: Settings) -> tuple[str, ...]:
    """`names`, what their ratios are taken to, and compute-only, in the order of the table."""
    known = registry()
    wanted = {COMPUTE_ONLY, *names}
    wanted |= {known[name].baseline_name(settings) for name in wanted}
    return tuple(name for name in known if name in wanted)
