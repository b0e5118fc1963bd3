"""The parts: in which order, with which share of the time, in how many processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "Part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part; what it does is in ``benchmarks/gpu/parts``."""

    name: str
    title: str
    about: str
    """What its tables show, for their reader."""
    share: float
    """Of the time, in relation to the others'; what one leaves over the later ones share."""
    case_limit_s: float = 60.0
    """After which a case counts as hung."""
    ranks: int = 1
    is_vital: bool = False
    """Whether no other part can run where it fails."""
    module: str = ""
    """By default that of its name."""

    @property
    def module_name(self) -> str:
        return self.module or f"benchmarks.gpu.parts.{self.name}"


PARTS = (
    Part(
        name="machine",
        title="What is there",
        about="",
        share=10,
        is_vital=True,
    ),
    Part(
        name="checks",
        title="Checks",
        about=(
            "Those of `tests/gpu`, two ranks. `parity`: every chain beside the same reducer followed by the "
            "optimizer's own `step()`; differences are parts of the largest value. `races`: with streams made "
            "late in turn, every chain computes what it computes in order, bit for bit. `sanitizer`: PyTorch's "
            "CUDA sanitizer sees no access to what another stream may still use. Peaks of memory are in MB, by "
            "`active_bytes`."
        ),
        share=190,
    ),
    Part(
        name="waits",
        title="Host synchronizations",
        about=(
            "Of one rank in a step, after warming up. `reported`: by PyTorch's synchronization debug mode. "
            "`runtime`: calls of `cudaStreamSynchronize` and the like in the profiler's trace. `values read`: by "
            "the host (`.item()`, `bool(tensor)`). On a CPU these stand for what would synchronize on a GPU; "
            "there fused AdamW reads its step counts, which on a GPU it does not."
        ),
        share=30,
        case_limit_s=40,
        ranks=2,
    ),
    Part(
        name="tests",
        title="The tests for GPUs",
        about="Those of the test suite that are marked for GPUs.",
        share=25,
    ),
    Part(
        name="timeline",
        title="Timeline of a step",
        about=(
            "By events on the streams, medians. `update`: of the optimizer. `update hidden`: what of it ran while "
            "forward or backward did. `communication`: while a collective was in progress. `exposed`: what of it "
            "nothing was computed under."
        ),
        share=25,
        case_limit_s=40,
    ),
    Part(
        name="ratios",
        title="Steps beside PyTorch's own",
        about=(
            "One process stands for all ranks on a simulated link, variants taking turns: median in ms and, in "
            "brackets, its ratio to plain DDP with fused AdamW. Gradients are views of the buckets; a collective "
            "has a latency of 20 µs. `peak`: of one variant alone, with what streams still hold (`active_bytes`). "
            "`sent`: by each rank in a step."
        ),
        share=160,
    ),
    Part(
        name="kernels",
        title="Kernels of wires and PowerSGD",
        about="By events on the stream, median. GB/s: bytes of fp32 values over the time.",
        share=35,
    ),
    Part(
        name="pictures",
        title="Pictures",
        about="",
        share=8,
    ),
)
