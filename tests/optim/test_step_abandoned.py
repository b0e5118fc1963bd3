"""An error of the model's own in backward, on one rank or on all: every rank raises at once, and the model can be used
again."""

import time
from typing import Any

import pytest
import torch
from step_loops import registered
from torch import Tensor, nn

from harness import assert_equal_ranks, on_ranks, wrap
from overlap import AllReduce, PeerError, chain

# The form, the layer behind which backward raises, the size of a bucket in layers, and the ranks on which it raises.
# Three layers of a bucket of four, or none, have gradients when no bucket has arrived yet.
CASES = (
    ("interleaved", 2, 1, (1,)),
    ("zero deferred", 1, 1, (1,)),
    ("interleaved", 1, 4, (1,)),
    ("zero deferred", 1, 4, (0, 1)),
    ("interleaved", 1, 4, (0, 1)),
    ("zero", 4, 4, (0, 1)),
)


class _Raises(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the dog ate it")


class _Net(nn.Module):
    """Fails in backward before the gradients of the layer ``place - 1``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.place: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate([*self.layers, nn.Identity()]):
            if place == self.place:
                x = _Raises.apply(x)  # type: ignore[no-untyped-call]
            x = layer(x).tanh()
        return x


def _check_failure(error: Exception | None, seconds: float, optimizer: Any, *, is_own: bool) -> None:
    assert seconds < 8
    if is_own:
        assert isinstance(error, ValueError)
        assert "the dog ate it" in str(error)
    else:
        assert isinstance(error, PeerError), repr(error)
        assert "rank 1: AbandonedBackwardError: backward ended with an error outside of the stages" in str(error)
    with pytest.raises(RuntimeError, match="the last backward or update raised"):
        optimizer.step()


@on_ranks(2)
def test_an_error_in_one_ranks_backward_is_an_error_on_every_rank_at_once(rank: int, world_size: int) -> None:
    for form, place, layers, failing in CASES:
        torch.manual_seed(0)
        ddp = wrap(_Net(), bucket_cap_mb=layers * 1100 / 2**20)
        optimizer = registered(form, ddp)
        start = {name: tensor.clone() for name, tensor in ddp.module.state_dict().items()}
        for step in range(7):
            is_failing = step in (3, 4)
            ddp.module.place = place if is_failing and rank in failing else None
            if step == 5 and form != "zero deferred":  # Its update may have been made in part.
                ddp.module.load_state_dict(start)
            loss = ddp(torch.full((4, 16), rank + 1.0)).square().sum()
            start_s = time.monotonic()
            try:
                loss.backward()
                error = None
            except (ValueError, PeerError) as raised:
                error = raised
            if is_failing:
                _check_failure(error, time.monotonic() - start_s, optimizer, is_own=rank in failing)
                warned = any("load a checkpoint" in note for note in getattr(error, "__notes__", ()))
                assert not warned or (form != "zero deferred" and layers == 1)
                continue
            assert error is None, f"{form}, step {step}: {error!r}"
            optimizer.step()
        if hasattr(optimizer, "wait"):
            optimizer.wait()
        assert_equal_ranks([ddp.module.layers[0].weight], form)


@on_ranks(2)
def test_after_an_error_before_the_first_bucket_the_model_works_with_a_chain_and_without(rank: int) -> None:
    """After an error before the first bucket plain DDP goes on, and equals a model that never had a chain."""
    torch.manual_seed(0)
    ddp, reference = wrap(_Net()), wrap(_Net())
    reference.module.load_state_dict(ddp.module.state_dict())
    registration = chain(AllReduce()).register(ddp)
    for step in range(5):
        if step == 2:
            ddp.module.place = 1
            with pytest.raises(ValueError, match="the dog ate it"):
                ddp(torch.ones(4, 16)).sum().backward()
            ddp.module.place = None
            registration.remove()
        if step == 4:
            chain(AllReduce()).register(ddp)
        for model in (ddp, reference):
            model.zero_grad()
            model(torch.full((4, 16), rank + step + 1.0)).square().sum().backward()
        for ours, plain in zip(ddp.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)  # type: ignore[arg-type]
