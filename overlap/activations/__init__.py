"""Memory saved between forward and backward: activations computed again, or kept on the CPU."""

from overlap.activations.apply import apply_activation_checkpointing
from overlap.activations.checkpoint import Checkpointed, checkpoint_wrapper
from overlap.activations.offload import (
    Offloaded,
    limit_offload_in_flight,
    limit_offload_pool,
    offload_wrapper,
    offloaded_bytes,
    release_offload_pool,
)

__all__ = [
    "Checkpointed",
    "Offloaded",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "limit_offload_in_flight",
    "limit_offload_pool",
    "offload_wrapper",
    "offloaded_bytes",
    "release_offload_pool",
]
