"""Stages of a gradient bucket, the engine that runs them, and the reducers."""

from typing import Any

from overlap._lazy import check_imported_as, missing_name
from overlap.hooks.adapters import StageHook, as_hook, as_stage, reducer
from overlap.hooks.bucket import Bucket
from overlap.hooks.chain import Chain, chain, register
from overlap.hooks.collectives import (
    all_gather,
    all_reduce,
    future_result,
    reduce_scatter,
    send_recv,
    whole_pass,
)
from overlap.hooks.engine.registration import Registration
from overlap.hooks.post_local_sgd import PostLocal, PostLocalSGDState, post_localSGD_hook
from overlap.hooks.powersgd import PowerSGD, PowerSGDState, powerSGD_hook
from overlap.hooks.quantize import Quantize
from overlap.hooks.reducers import AllReduce, Cast, NoReduction
from overlap.hooks.route import route
from overlap.hooks.stage import Role, Stage, StageContext
from overlap.hooks.torch_names import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from overlap.hooks.transforms import ClipGradNorm, DivideByCount, Log, SkipNonFinite, Transform
from overlap.hooks.wires import BFloat16, Float8, Float16, Int4, Int8, TopK, Wire

check_imported_as(__name__, "overlap.hooks")

__all__ = [
    "AllReduce",
    "BFloat16",
    "Bucket",
    "Cast",
    "Chain",
    "Float16",
    "Float8",
    "ClipGradNorm",
    "DivideByCount",
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
    "Wire",
    "Transform",
    "all_gather",
    "all_reduce",
    "allreduce_hook",
    "as_hook",
    "as_stage",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "chain",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "future_result",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "reduce_scatter",
    "reducer",
    "register",
    "route",
    "send_recv",
    "whole_pass",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
