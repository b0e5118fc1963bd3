"""The state of a framework's model and optimizer after a run."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def prepare_rank(rank: int, world_size: int) -> None:
    """Make this process what a launcher such as torchrun would have made of it."""
    warnings.resetwarnings()
    # The frameworks', of each other and of PyTorch; those of overlap stay errors.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"overlap\b")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # The default group is there already.
        TORCHELASTIC_RUN_ID="tests",
        HF_HUB_OFFLINE="1",
        ACCELERATE_USE_CPU="true",
    )


def model_of_two_buckets() -> nn.Module:
    """For DDP with ``bucket_cap_mb=0.005``: several buckets, some with two parameters."""
    torch.manual_seed(0)
    # Without a bias whose gradient is nothing but rounding.
    return nn.Sequential(
        nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 4)
    )


def copied(value: Any) -> Any:
    """A copy of nested tensors and plain values, without what names objects."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(one) for one in value]
    return value


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Parameters, buffers and the whole state of an optimizer, also of one that is divided among ranks."""
    inner = optimizer
    while type(inner).__name__ in ("AcceleratedOptimizer", "LightningOptimizer") or hasattr(inner, "synchronize"):
        inner = inner.optimizer if not hasattr(inner, "synchronize") else inner.optim
    model = getattr(model, "module", model)
    found = {"model": copied(model.state_dict())}
    if hasattr(inner, "consolidate_state_dict"):
        inner.consolidate_state_dict()
        if inner.rank != 0:
            return found
    state = inner.state_dict()
    return {**found, "state": copied(state["state"]), "lr": [group["lr"] for group in state["param_groups"]]}
