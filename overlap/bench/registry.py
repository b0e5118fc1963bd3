"""The list of variants: what each is called, compared with and built by. `overlap.bench.variants` fills it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from overlap.bench.settings import Settings, SettingsError
from overlap.bench.site import Prepared, Site

COMPUTE_ONLY = "compute-only"
FloorKind = Literal["compute", "bucketed", "streamed"]
Build = Callable[[Site], Prepared]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table; see `variant` for the fields."""

    name: str
    build: Build
    optimizer: str | None
    baseline: str | None
    floor: FloorKind
    block_steps: int
    lead_in_steps: int
    apart: bool
    backends: tuple[str, ...]

    def optimizer_name(self, settings: Settings) -> str:
        return self.optimizer or settings.optimizer

    def baseline_name(self, settings: Settings) -> str:
        if self.baseline is not None:
            return self.baseline
        # AdamW rows are held against the fastest plain AdamW, whichever kernel they use themselves.
        optimizer = self.optimizer_name(settings)
        return f"ddp-{optimizer}" if optimizer.startswith("sgd") else "ddp-adamw-fused"


_REGISTRY: dict[str, Variant] = {}


def variant(
    name: str,
    *,
    optimizer: str | None = None,
    baseline: str | None = None,
    floor: FloorKind = "bucketed",
    block_steps: int = 1,
    lead_in_steps: int = 0,
    apart: bool = False,
    backends: tuple[str, ...] = ("gloo", "nccl"),
) -> Callable[[Build], Build]:
    """Adds a variant; the decorated function builds it from a `Site`.

    Args:
        name: what the row is called, in the table and on the command line.
        optimizer: the one it steps with; by default that of `--optimizer`.
        baseline: the variant its ratio is taken to; by default plain DDP with the same kind of optimizer.
        floor: which bound holds for it: `"bucketed"` where buckets must be through before the step ends,
            `"streamed"` where communication may ride anywhere, `"compute"` where there is none.
        block_steps: steps timed together, for a variant whose steps differ (one average in eight, say).
        lead_in_steps: untimed steps before them, for one that leaves work in flight to the next step.
        apart: it may crash at any step: it is timed by itself, with no one but its baseline.
        backends: where it can run at all; what merely refuses is left to refuse, and becomes a row that says so.
    """

    def add(build: Build) -> Build:
        assert name not in _REGISTRY, f"two variants are called {name}"
        _REGISTRY[name] = Variant(
            name=name, build=build, optimizer=optimizer, baseline=baseline, floor=floor,
            block_steps=block_steps, lead_in_steps=lead_in_steps, apart=apart, backends=backends,
        )  # fmt: skip
        return build

    return add


def registry() -> dict[str, Variant]:
    """Every variant by name, in the order of the table."""
    import overlap.bench.variants  # noqa: F401 - importing it registers them

    return dict(_REGISTRY)


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
