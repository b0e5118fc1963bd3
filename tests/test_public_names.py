"""What may be imported from where. A change here is a change for users, and belongs into the changelog."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "overlap": [
        "AllGather",
        "AllReduce",
        "Bucket",
        "Cast",
        "Chain",
        "CollectiveError",
        "ConfigurationError",
        "NoReduction",
        "OptimizerHookState",
        "OverlapError",
        "OverlappedOptimizer",
        "PeerError",
        "Registration",
        "RegistrationError",
        "Stage",
        "Step",
        "Timeline",
        "TrainingLoopError",
        "UnsupportedError",
        "ZeroRedundancyOptimizer",
        "ZeroStep",
        "allgather_then_aggregate_hook",
        "allreduce_hook",
        "as_hook",
        "as_stage",
        "bf16_compress_hook",
        "bf16_compress_wrapper",
        "chain",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "hook_then_optimizer",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
        "noop_hook",
        "register",
    ],
    "overlap.hooks": [
        "AllGather",
        "AllReduce",
        "Bucket",
        "Cast",
        "Chain",
        "NoReduction",
        "Registration",
        "Role",
        "Site",
        "Stage",
        "StageHook",
        "all_gather",
        "all_reduce",
        "allgather_then_aggregate_hook",
        "allreduce_hook",
        "as_hook",
        "as_stage",
        "bf16_compress_hook",
        "bf16_compress_wrapper",
        "broadcast",
        "chain",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "future_result",
        "noop_hook",
        "reduce_scatter",
        "register",
        "send_recv",
        "whole_pass",
    ],
    "overlap.optim": [
        "FunctionalAdadelta",
        "FunctionalAdagrad",
        "FunctionalAdam",
        "FunctionalAdamW",
        "FunctionalAdamax",
        "FunctionalOptimizer",
        "FunctionalRMSprop",
        "FunctionalRprop",
        "FunctionalSGD",
        "OverlappedOptimizer",
        "Step",
        "ZeroRedundancyOptimizer",
        "ZeroStep",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
    ],
    "overlap.join": [
        "gradient_divisor",
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_these(module: str) -> None:
    room = importlib.import_module(module)
    assert sorted(room.__all__) == NAMES[module]
    assert all(hasattr(room, name) for name in room.__all__)
