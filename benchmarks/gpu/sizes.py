"""How much is run: all of it on a GPU, the same in small on a CPU, and the least that shows that it works."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Sizes"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parts are told about size."""

    checks: int | None
    """How many of the checks of each topic; all where ``None``."""
    counted_chains: int
    """How many chains host synchronizations are counted of."""
    models: tuple[str, ...]
    """Those that steps are timed with; see ``trained.py``."""
    timeline_model: str
    variants: int | None
    """How many variants of the training step are timed; all where ``None``."""
    bandwidths_gbit: tuple[float, ...]
    """Of the simulated links, in Gbit/s."""
    timeline_gbit: float
    simulated_ranks: int
    """How many ranks one process stands for on a simulated link."""
    rounds: int
    """Samples of each variant, at most."""
    kernel_numel: int
    """Values that are encoded and decoded, or compressed, in one call."""
    kernel_repeats: int
    compiled_kernels: bool
    """Whether ``torch.compile`` is tried; what it makes for a CPU says nothing of a GPU, and takes its time."""


SIZES = {
    "full": Sizes(
        checks=None,
        counted_chains=20,
        models=("resnet50", "gpt-350m"),
        timeline_model="resnet50",
        variants=None,
        bandwidths_gbit=(10.0, 25.0, 100.0, 400.0),
        timeline_gbit=100.0,
        simulated_ranks=8,
        rounds=15,
        kernel_numel=25 * 2**20 // 4,
        kernel_repeats=30,
        compiled_kernels=True,
    ),
    "small": Sizes(
        checks=8,
        counted_chains=3,
        models=("resnet-small", "gpt-small"),
        timeline_model="resnet-small",
        variants=None,
        bandwidths_gbit=(0.1, 1.0),
        timeline_gbit=0.1,
        simulated_ranks=8,
        rounds=3,
        kernel_numel=2**18,
        kernel_repeats=5,
        compiled_kernels=False,
    ),
    "least": Sizes(
        checks=2,
        counted_chains=1,
        models=("gpt-small",),
        timeline_model="gpt-small",
        variants=3,
        bandwidths_gbit=(1.0,),
        timeline_gbit=1.0,
        simulated_ranks=2,
        rounds=3,
        kernel_numel=2**12,
        kernel_repeats=2,
        compiled_kernels=False,
    ),
}
