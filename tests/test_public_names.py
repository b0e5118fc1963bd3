"""What may be imported from where. A change here is a change for users, and belongs into the changelog."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import overlap
from overlap._lazy import REMOVED

NAMES = {
    "overlap": [
        "AllGather",
        "AllReduce",
        "BFloat16",
        "Bucket",
        "Cast",
        "ClipGradNorm",
        "Float16",
        "Float8",
        "Hierarchical",
        "Int4",
        "Int8",
        "Join",
        "JoinHook",
        "Joinable",
        "LocalSGD",
        "Log",
        "OptimizerHookState",
        "OverlapError",
        "OverlappedOptimizer",
        "PowerSGD",
        "Quantize",
        "ReduceScatter",
        "SkipNonFinite",
        "Stage",
        "Step",
        "Timeline",
        "TopK",
        "ZeroRedundancyOptimizer",
        "ZeroStep",
        "auto",
        "auto_quantize",
        "chain",
        "checkpoint_wrapper",
        "declare",
        "hook_then_optimizer",
        "load_state_dict",
        "offload_wrapper",
        "register",
        "route",
        "state_dict",
    ],
    "overlap.hooks": [
        "AllGather",
        "AllReduce",
        "BFloat16",
        "Bucket",
        "Cast",
        "Chain",
        "ClipGradNorm",
        "Float16",
        "Float8",
        "GatherQuantized",
        "Hierarchical",
        "Int4",
        "Int8",
        "Log",
        "NoReduction",
        "PostLocal",
        "PostLocalSGDState",
        "PowerSGD",
        "PowerSGDState",
        "Quantize",
        "Registration",
        "Role",
        "SkipNonFinite",
        "Stage",
        "StageContext",
        "StageHook",
        "TopK",
        "Transform",
        "Wire",
        "all_gather",
        "all_reduce",
        "allgather_then_aggregate_hook",
        "allreduce_hook",
        "as_hook",
        "as_stage",
        "batched_powerSGD_hook",
        "bf16_compress_hook",
        "bf16_compress_wrapper",
        "broadcast",
        "chain",
        "fp16_compress_hook",
        "fp16_compress_wrapper",
        "future_result",
        "noop_hook",
        "post_localSGD_hook",
        "powerSGD_hook",
        "quantization_perchannel_hook",
        "quantization_pertensor_hook",
        "reduce_scatter",
        "reducer",
        "register",
        "route",
        "send_recv",
        "whole_pass",
    ],
    "overlap.optim": [
        "Average",
        "FunctionalAdadelta",
        "FunctionalAdagrad",
        "FunctionalAdam",
        "FunctionalAdamW",
        "FunctionalAdamax",
        "FunctionalOptimizer",
        "FunctionalRMSprop",
        "FunctionalRprop",
        "FunctionalSGD",
        "HierarchicalModelAverager",
        "LocalSGD",
        "ModelAverager",
        "OverlappedOptimizer",
        "PeriodicModelAverager",
        "PostLocalSGDOptimizer",
        "ReduceScatter",
        "Step",
        "ZeroRedundancyOptimizer",
        "ZeroStep",
        "average_parameters",
        "declare",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
    ],
    "overlap.activations": [
        "Checkpointed",
        "Offloaded",
        "apply_activation_checkpointing",
        "checkpoint_wrapper",
        "offload_wrapper",
    ],
    "overlap.errors": [
        "ArgumentTypeError",
        "CollectiveError",
        "ConfigurationError",
        "OverlapError",
        "PeerError",
        "RegistrationError",
        "TrainingLoopError",
        "UnsupportedError",
    ],
    "overlap.plan": [
        "Plan",
        "auto",
    ],
    "overlap.quantized": [
        "DQuantType",
        "auto_quantize",
    ],
    "overlap.resume": [
        "TrainState",
        "load_state_dict",
        "state_dict",
    ],
    "overlap.join": [
        "Join",
        "JoinHook",
        "Joinable",
        "gradient_divisor",
    ],
}


EVERY_MODULE = pytest.mark.parametrize("name", NAMES)


@EVERY_MODULE
def test_all_lists_these_names_and_no_others_and_they_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == NAMES[name]
    assert all(hasattr(module, public) for public in module.__all__)


def test_the_first_page_is_short() -> None:
    assert len(overlap.__all__) <= 40


@EVERY_MODULE
def test_every_listed_name_of_a_package_is_an_attribute_of_overlap_too(name: str) -> None:
    module = importlib.import_module(name)
    assert all(getattr(overlap, public) is getattr(module, public) for public in module.__all__)


def test_dir_shows_the_names_and_the_packages_and_no_helpers() -> None:
    shown = {name for name in dir(overlap) if not name.startswith("__")}
    packages = {name.partition(".")[2] for name in NAMES} - {""}
    assert shown == {*overlap.__all__, *packages, "compose", "timeline"}


def test_a_removed_name_says_what_takes_its_place() -> None:
    for name, instead in REMOVED.items():
        with pytest.raises(AttributeError, match=re.escape(f"overlap.{name} has been removed: {instead}")):
            getattr(overlap, name)
        with pytest.raises(ImportError, match=re.escape(instead)):
            exec(f"from overlap import {name}")


@pytest.mark.parametrize("package", ["hooks", "join", "optim"])
def test_the_links_at_the_root_are_not_packages(package: str) -> None:
    """Imported by that name they would be second copies, with classes of their own."""
    root = Path(__file__).parents[1]
    shown = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=root, capture_output=True, text=True, check=False
    )
    assert f"ImportError: import overlap.{package}, not {package}" in shown.stderr
