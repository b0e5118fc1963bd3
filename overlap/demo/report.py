"""What rank 0 prints and saves at the end."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlap.demo.parity import Parity
from overlap.demo.settings import Settings
from overlap.launch import World

__all__ = ["Outcome", "Report"]

# With more ranks the order of summation is the backend's to choose.
_EXACT_RANKS = 2
_ACCURACY_SLACK = 0.01


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    description: str
    accuracy: float
    step_ms: float
    losses: list[float]


@dataclass(frozen=True)
class Report:
    """The comparison of the two runs."""

    settings: Settings
    world: World
    plain: Outcome
    overlapped: Outcome
    parity: Parity
    exact: bool

    @property
    def must_be_equal(self) -> bool:
        """Whether anything but equal results is a failure."""
        return self.exact and self.world.size <= _EXACT_RANKS

    @property
    def passed(self) -> bool:
        """Equal where that can be asked for, else no less accurate than the plain run by more than 1 point."""
        if self.must_be_equal:
            return self.parity.largest == 0
        return self.overlapped.accuracy >= self.plain.accuracy - _ACCURACY_SLACK

    def verdict(self) -> str:
        """One line."""
        if self.must_be_equal:
            if self.passed:
                return "Equal: parameters, optimizer state and buffers are the same in every bit."
            return f"NOT EQUAL: the largest difference is {self.parity.largest:.3g}, and must be 0."
        other = (
            "parameters are averaged now and then"
            if self.settings.local_sgd is not None
            else "these gradients are compressed, so that results differ"
        )
        reason = f"above {_EXACT_RANKS} ranks the order of summation may differ" if self.exact else other
        points = 100 * (self.overlapped.accuracy - self.plain.accuracy)
        outcome = "Compared by accuracy" if self.passed else "LESS ACCURATE"
        return f"{outcome} ({reason}): {points:+.1f} points, -{100 * _ACCURACY_SLACK:.0f} is allowed."

    def table(self) -> str:
        """The two runs side by side."""
        rows = [
            ("", "plain DDP", "overlapped"),
            ("accuracy on the test split", f"{self.plain.accuracy:.4f}", f"{self.overlapped.accuracy:.4f}"),
            ("loss at the last step", f"{self.plain.losses[-1]:.4f}", f"{self.overlapped.losses[-1]:.4f}"),
            ("step, median", f"{self.plain.step_ms:.1f} ms", f"{self.overlapped.step_ms:.1f} ms"),
            ("largest difference: parameters", "", f"{self.parity.parameters:.3g}"),
            ("  optimizer state", "", f"{self.parity.optimizer_state:.3g}"),
            ("  buffers", "", f"{self.parity.buffers:.3g}"),
        ]
        return "\n".join(f"{label:<32}{one:>12}{other:>12}".rstrip() for label, one, other in rows)

    def write_json(self, path: Path) -> None:
        """Saves all of it; a difference that is not finite is `null`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._values(), indent=2, allow_nan=False) + "\n")

    def write_plot(self, path: Path) -> None:
        """Saves the loss curves of both runs as a PNG."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        # Equal curves hide each other: the first is wide and pale, the second thin and dashed.
        axes.plot(self.plain.losses, color="#9ecae1", linewidth=5, label="plain DDP")
        axes.plot(self.overlapped.losses, color="#d62728", linewidth=1.2, linestyle="--", label="overlapped")
        axes.set_xlabel("training step")
        axes.set_ylabel("cross-entropy loss, mean over ranks (nats)")
        axes.set_title(f"ResNet-18 on handwritten digits, {self.settings.optimizer}, {self.world.size} ranks")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)

    def _values(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "verdict": self.verdict(),
            "must_be_equal": self.must_be_equal,
            "parity_max_abs_diff": _finite(self.parity.largest),
            "parity_parameters_max_abs_diff": _finite(self.parity.parameters),
            "parity_optimizer_state_max_abs_diff": _finite(self.parity.optimizer_state),
            "parity_buffers_max_abs_diff": _finite(self.parity.buffers),
            "accuracy_plain": self.plain.accuracy,
            "accuracy_overlapped": self.overlapped.accuracy,
            "step_ms_plain": self.plain.step_ms,
            "step_ms_overlapped": self.overlapped.step_ms,
            "step_ratio": self.overlapped.step_ms / self.plain.step_ms,
            "loss_plain": [_finite(loss) for loss in self.plain.losses],
            "loss_overlapped": [_finite(loss) for loss in self.overlapped.losses],
            "plan_plain": self.plain.description,
            "plan_overlapped": self.overlapped.description,
            "settings": {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.settings).items()
            },
            "machine": _machine(self.world),
        }


def _machine(world: World) -> dict[str, Any]:
    return {
        "ranks": world.size,
        "backend": world.backend,
        "device": str(world.device.type),
        "device_name": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
