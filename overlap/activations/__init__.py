"""Memory saved between forward and backward: activations computed again, or kept on the CPU."""

from overlap.activations.offload import offloaded_bytes
from overlap.activations.wrappers import (
    Checkpointed,
    Offloaded,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

__all__ = [
    "Checkpointed",
    "Offloaded",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
    "offloaded_bytes",
]
