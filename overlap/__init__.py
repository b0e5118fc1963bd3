"""Let everything that must happen to a gradient run in DDP's backward.

>>> import overlap
>>> overlap.chain(overlap.AllReduce())
chain(AllReduce())
"""

from overlap.activations import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper
from overlap.compose import OptimizerHookState, hook_then_optimizer
from overlap.errors import (
    CollectiveError,
    ConfigurationError,
    OverlapError,
    PeerError,
    QuantizationOverflowError,
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
    PowerSGD,
    PowerSGDState,
    Quantize,
    Registration,
    Stage,
    allgather_then_aggregate_hook,
    allreduce_hook,
    as_hook,
    as_stage,
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    chain,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    powerSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    reducer,
    register,
    route,
)
from overlap.join import Join, Joinable, JoinHook
from overlap.optim import (
    LocalSGD,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from overlap.quantized import DQuantType, auto_quantize
from overlap.resume import TrainState, load_state_dict, state_dict
from overlap.timeline import Timeline

__all__ = [
    "AllGather",
    "AllReduce",
    "Bucket",
    "Cast",
    "Chain",
    "CollectiveError",
    "ConfigurationError",
    "DQuantType",
    "Join",
    "JoinHook",
    "Joinable",
    "LocalSGD",
    "NoReduction",
    "OptimizerHookState",
    "OverlapError",
    "OverlappedOptimizer",
    "PeerError",
    "PowerSGD",
    "PowerSGDState",
    "QuantizationOverflowError",
    "Quantize",
    "Registration",
    "RegistrationError",
    "Stage",
    "Step",
    "Timeline",
    "TrainState",
    "TrainingLoopError",
    "UnsupportedError",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "allgather_then_aggregate_hook",
    "allreduce_hook",
    "apply_activation_checkpointing",
    "as_hook",
    "as_stage",
    "auto_quantize",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "chain",
    "checkpoint_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_then_optimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "load_state_dict",
    "noop_hook",
    "offload_wrapper",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "reducer",
    "register",
    "route",
    "state_dict",
]

__version__ = "0.1.0"
