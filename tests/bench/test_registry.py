"""Which variants there are, and which of them a run needs."""

from __future__ import annotations

import pytest

from overlap.bench.registry import choose, registry
from overlap.bench.settings import Settings


def test_every_variant_that_was_promised_is_there() -> None:
    promised = {
        "compute-only", "ddp-sgd", "ddp-adamw", "ddp-adamw-fused", "torch-hook-then-optimizer-adamw",
        "overlap-step-adamw", "torch-zero-sgd", "torch-zero-adamw", "torch-fp16", "overlap-fp16", "torch-bf16",
        "overlap-bf16", "torch-powersgd-r4", "torch-join", "torch-averager", "torch-quantize8",
        "overlap-join", "overlap-join-unknown",
    }  # fmt: skip
    assert promised <= set(registry())


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw", "adamw-fused"])
def test_every_baseline_is_a_variant(optimizer: str) -> None:
    settings = Settings(optimizer=optimizer)
    for variant in registry().values():
        baseline = registry()[variant.baseline_name(settings)]
        assert baseline.baseline_name(settings) == baseline.name


def test_what_runs_on_nccl_alone_is_left_out_on_gloo() -> None:
    assert "torch-zero-interleaved-adamw" not in choose(Settings(), "gloo")
    assert "torch-zero-interleaved-adamw" in choose(Settings(), "nccl")


def test_what_is_asked_for_runs_on_any_backend_with_its_baselines() -> None:
    asked = Settings(variants=("torch-zero-interleaved-adamw",))
    assert choose(asked, "gloo") == ("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-zero-interleaved-adamw")
