"""Let everything that must happen to a gradient ride in DDP's backward.

>>> import overlap
>>> overlap.chain(overlap.AllReduce())
chain(AllReduce())
"""

from overlap.compose import OptimizerHookState, hook_then_optimizer
from overlap.errors import (
    CollectiveError,
    ConfigurationError,
    OverlapError,
    PeerError,
    RegistrationError,
    TrainingLoopError,
    UnsupportedError,
)
from overlap.hooks import (
    AllGather,
    AllReduce,
    Bucket,
    Cast,
    Chain,
    NoReduction,
    Registration,
    Stage,
    allgather_then_aggregate_hook,
    allreduce_hook,
    as_hook,
    as_stage,
    bf16_compress_hook,
    bf16_compress_wrapper,
    chain,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    register,
)
from overlap.join import Join, Joinable, JoinHook
from overlap.optim import (
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from overlap.timeline import Timeline

__all__ = [
    "AllGather",
    "AllReduce",
    "Bucket",
    "Cast",
    "Chain",
    "CollectiveError",
    "ConfigurationError",
    "Join",
    "JoinHook",
    "Joinable",
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
]

__version__ = "0.1.0"
