"""Training steps beside PyTorch's own, on simulated links: each variant tried alone, then all timed in turns."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bench.variants import COMPUTE_ONLY, TrainingLoop, registry
from benchmarks.gpu.given import Given, Skipped
from benchmarks.gpu.trained import TITLES, Trainee, bytes_per_s, open_link
from benchmarks.measuring import MemoryMeter, counted_bytes, quartiles
from benchmarks.simulated import SimulatedLink

_BASELINE = "ddp-adamw-fused"
_VARIANTS = (
    COMPUTE_ONLY,
    _BASELINE,
    "overlap-step-adamw",
    "overlap-step-adamw-deferred",
    "torch-hook-then-optimizer-adamw",
    "overlap-zero-adamw",
    "overlap-zero-adamw-gather-forward",
    "torch-zero-adamw",
    "torch-zero-interleaved-adamw",
    "torch-fp16-adamw",
    "overlap-bf16",
    "torch-powersgd-r4",
    "overlap-powersgd-r4",
    "overlap-quantize8",
    "overlap-quantize4-feedback",
    "overlap-zero-adamw-int4-int8-gather-forward",
)
_TOGETHER = "timed together"
_COUNTED_STEPS = 2
# A sample is of so many steps that it takes about this long.
_SAMPLE_S = 0.25
_LEAST_ROUNDS, _LEAST_SAMPLE_STEPS = 3, 2
_TRIAL_LIMIT_S = 40.0

_link: SimulatedLink
_trainees: dict[str, Trainee] = {}


def cases(given: Given) -> list[str]:
    global _link
    _link = open_link(given)
    variants = _VARIANTS[: given.sizes.variants]
    return [f"{model}: {what}" for model in given.sizes.models for what in (*variants, _TOGETHER)]


def limit_s(case: str, given: Given) -> float:
    """How long a case may take: the timing takes what the part has."""
    return max(given.left_s, 1.0) if case.endswith(_TOGETHER) else _TRIAL_LIMIT_S


def run(case: str, given: Given) -> None:
    model, what = case.split(": ")
    trainee = _trainees.get(model)
    if trainee is None:
        _trainees.clear()
        _release()
        trainee = _trainees[model] = Trainee.of(model, given)
    if what == _TOGETHER:
        _time_together(trainee, given)
    else:
        _try(trainee, what, given)


def _trial_path(model: str, variant: str, given: Given) -> Path:
    """A file that is there if the variant came through its trial, also for the process after this one."""
    return given.shared / f"{model}.{variant}.ran"


def _try(trainee: Trainee, name: str, given: Given) -> None:
    """Does it run at all, what does it send, how much memory does it take?"""
    _link.bandwidth_bytes_per_s = bytes_per_s(1e6)
    _release()
    meter, held_bytes = MemoryMeter(trainee.device), _held_bytes(trainee.device)
    try:
        loop = trainee.build(name)
        before_bytes = counted_bytes()
        for _ in range(_COUNTED_STEPS):
            loop.step()
        loop.finish()
        trainee.synchronize()
    except Exception as error:
        if name.startswith("torch-"):
            # PyTorch's own refuse what they do not know, which does not count as a failure of this run.
            given.row(TITLES[trainee.name], {"variant": name, "": _first_line(error)})
            raise Skipped(f"refuses: {_first_line(error)}") from error
        raise
    row: dict[str, str | float] = {
        "variant": name,
        "peak MB": (meter.peak_bytes() - held_bytes) / 1e6,
        "sent MB": (counted_bytes() - before_bytes) / _COUNTED_STEPS / 1e6,
    }
    given.row(TITLES[trainee.name], row)
    _trial_path(trainee.name, name, given).touch()


@dataclass
class _Timed:
    name: str
    loop: TrainingLoop
    steps: int = 1
    samples_ms: list[float] = field(default_factory=list)

    def sample_ms(self, trainee: Trainee) -> float:
        """The time of a step, over some of them."""
        variant = registry()[self.name]
        for _ in range(variant.lead_in_steps):
            self.loop.step()
        trainee.synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.loop.step()
        if not variant.lead_in_steps:
            self.loop.finish()
        trainee.synchronize()
        elapsed_s = time.perf_counter() - start
        self.loop.finish()
        return 1000 * elapsed_s / self.steps


def _time_together(trainee: Trainee, given: Given) -> None:
    names = [name for name in _VARIANTS if _trial_path(trainee.name, name, given).exists()]
    if _BASELINE not in names:
        raise Skipped(f"there is nothing to compare with: {_BASELINE} did not come through its trial")
    later = given.sizes.models[given.sizes.models.index(trainee.name) + 1 :]
    until = time.time() + given.left_s / (1 + 2 * len(later))
    groups = 0
    for group in _groups(trainee, names, given):
        groups += 1
        for gbit in sorted(given.sizes.bandwidths_gbit, reverse=True):
            # The rest is for the slower links and the next group.
            _time_on(gbit, group, trainee, given, share_s=(until - time.time()) / 2)
    if groups > 1:
        given.note(
            f"{trainee.name} was timed in {groups} groups, each with the baseline: memory holds no more at once."
        )


def _groups(trainee: Trainee, names: list[str], given: Given) -> Iterator[list[_Timed]]:
    """As many variants at a time as there is memory for, each group with the baseline."""
    _link.bandwidth_bytes_per_s = bytes_per_s(1e6)
    fixed = [_Timed(name, trainee.build(name)) for name in (COMPUTE_ONLY, _BASELINE) if name in names]
    group = list(fixed)
    largest_bytes = 0
    for name in names:
        if name in (COMPUTE_ONLY, _BASELINE):
            continue
        if len(group) > len(fixed) and _free_bytes(trainee.device) < 1.3 * largest_bytes:
            yield group
            del group[len(fixed) :]
            _release()
        before_bytes = _free_bytes(trainee.device)
        try:
            group.append(_Timed(name, trainee.build(name)))
        except torch.OutOfMemoryError:
            given.note(f"{trainee.name}, {name} was not timed: there was no memory for it beside the baseline.")
            _release()
        except Exception as error:
            _say_that_it_raised(name, error, trainee, given)
        largest_bytes = max(largest_bytes, before_bytes - _free_bytes(trainee.device), _transient_bytes(trainee.device))
    yield group


def _time_on(gbit: float, group: list[_Timed], trainee: Trainee, given: Given, share_s: float) -> None:
    _link.bandwidth_bytes_per_s = bytes_per_s(gbit)
    until = time.time() + share_s
    for timed in list(group):
        lead_in = registry()[timed.name].lead_in_steps
        timed.samples_ms, timed.steps = [], _LEAST_SAMPLE_STEPS if lead_in else 1
        with _left_out_if_it_raises(timed, group, trainee, given):
            step_ms = timed.sample_ms(trainee)
            timed.steps = max(timed.steps, min(20, round(1000 * _SAMPLE_S / step_ms)))
    order = random.Random(0)
    round_s = 0.0
    for number in range(given.sizes.rounds):
        if number and time.time() + round_s > until and (number >= _LEAST_ROUNDS or given.left_s < 2 * round_s):
            break
        start = time.time()
        for timed in order.sample(group, len(group)):
            with _left_out_if_it_raises(timed, group, trainee, given):
                timed.samples_ms.append(timed.sample_ms(trainee))
        round_s = time.time() - start
    _report(gbit, group, trainee, given)


@contextlib.contextmanager
def _left_out_if_it_raises(timed: _Timed, group: list[_Timed], trainee: Trainee, given: Given) -> Iterator[None]:
    """The others have models and process groups of their own, and go on."""
    try:
        yield
    except Exception as error:
        if timed.name == _BASELINE:
            raise
        group.remove(timed)
        _say_that_it_raised(timed.name, error, trainee, given)


def _say_that_it_raised(name: str, error: Exception, trainee: Trainee, given: Given) -> None:
    given.row(TITLES[trainee.name], {"variant": name, "": f"raised while it was timed: {_first_line(error)}"})
    # PyTorch's own ZeRO does now and then.
    if not name.startswith("torch-"):
        given.wrong(f"{name}: {_first_line(error)}")


def _report(gbit: float, group: list[_Timed], trainee: Trainee, given: Given) -> None:
    link = f"{gbit:g} Gbit/s"
    baseline_ms = statistics.median(next(timed for timed in group if timed.name == _BASELINE).samples_ms)
    for timed in group:
        low_ms, median_ms, high_ms = quartiles(timed.samples_ms)
        ratio = median_ms / baseline_ms
        cells = {link: f"{median_ms:.1f} ({ratio:.2f})", f"{link}, p25 - p75": f"{low_ms:.1f} - {high_ms:.1f}"}
        given.row(TITLES[trainee.name], {"variant": timed.name, **cells})
        figures = {"median_ms": median_ms, "p25_ms": low_ms, "p75_ms": high_ms, "ratio": ratio}
        given.data(
            f"{trainee.name}|{timed.name}|{gbit:g}",
            {"samples": len(timed.samples_ms), **{key: round(value, 4) for key, value in figures.items()}},
        )


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _held_bytes(device: torch.device) -> int:
    """What is held before a variant is built: the model that it copies. On a CPU the meter leaves that out itself."""
    return torch.cuda.memory_stats(device)["active_bytes.all.current"] if device.type == "cuda" else 0


def _free_bytes(device: torch.device) -> int:
    """What a GPU could still give, with what the allocator keeps for later."""
    if device.type != "cuda":
        return 2**62
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _transient_bytes(device: torch.device) -> int:
    """What a step takes for its activations, on top of what stays."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]
