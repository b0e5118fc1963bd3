"""Equal to PyTorch's hook, where that one runs: one bucket on Gloo, with the same random starts, 10 iterations."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import run_ranks
from overlap import PowerSGDState
from overlap.hooks.powersgd.algorithm import random_directions

START = 2  # The earliest that PyTorch's hook can begin.
STEPS = START + 10


class Free(nn.Module):
    """Parameters whose gradients are what the batch says."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = [(20, 16), (16,), (8, 4, 3, 3), (20, 16), (5, 5), (30, 7)]
        self.all = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, gradients, strict=True)]).sum()


@contextmanager
def _our_random_starts(step: list[int], *, warm_start: bool) -> Iterator[None]:
    """Gives PyTorch's hook, which draws with `torch.randn`, the directions that ours starts from."""
    randn = torch.randn

    def ours(*shape: Any, **options: Any) -> Tensor:
        if "generator" in options:
            return randn(*shape, **options)
        *batch, length, rank = shape[0] if isinstance(shape[0], tuple | torch.Size) else shape
        options.pop("device", None)
        drawn = random_directions(
            rank,
            length,
            seed=0,
            dtype=options["dtype"],
            device=torch.device("cpu"),
            step=None if warm_start else step[0] - START,
        )
        return drawn.mT.expand(*batch, length, rank).clone()

    torch.randn = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn = randn


def _compare(rank: int, dtype: torch.dtype, tolerance: float, options: dict[str, Any]) -> None:
    # PyTorch orthogonalizes with QR from rank 3 on, and up to 2 with a loop that fails on its own zero columns.
    arguments = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": START,
        "min_compression_rate": 0.5,
        **options,
    }
    model = Free(dtype)
    their_state = theirs.PowerSGDState(None, **arguments)
    our_state = PowerSGDState(None, **arguments)
    reference, candidate = (DistributedDataParallel(copy.deepcopy(model)) for _ in range(2))
    reference.register_comm_hook(their_state, theirs.powerSGD_hook)
    registration = overlap.register(candidate, overlap.powerSGD_hook, our_state)
    generator = torch.Generator().manual_seed(rank)
    step = [0]
    compressed = 0
    for step[0] in range(STEPS):
        gradients = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in model.all]
        with _our_random_starts(step, warm_start=arguments.get("warm_start", True)):
            reference.zero_grad()
            reference(gradients).backward()
        candidate.zero_grad()
        candidate(gradients).backward()
        pairs = zip(candidate.parameters(), reference.parameters(), strict=True)
        for place, (ours, plain) in enumerate(pairs):
            assert ours.grad is not None and plain.grad is not None
            what = f"{options}, step {step[0]}, gradient {place}"
            torch.testing.assert_close(ours.grad, plain.grad, rtol=tolerance, atol=tolerance, msg=what)
            compressed += int(step[0] >= START and not torch.equal(ours.grad, _mean(gradients[place])))
    assert compressed >= 10 * 3, "compression ran"
    _, before, after = their_state.compression_stats()
    # PyTorch counts a vector as a matrix of one column: an element too many.
    vectors = 10 * sum(p.ndim == 1 for p in model.all)
    assert our_state.compression_stats() == (before / (after - vectors), before, after - vectors)
    if arguments.get("use_error_feedback", True):
        # Each rank keeps another part than PyTorch's does; their sum is what counts, and is the same.
        (their_errors,) = their_state.error_dict.values()
        their_errors = their_errors.clone()
        dist.all_reduce(their_errors)
        for key, residual in our_state.error_dict.items():
            total = residual.clone()
            dist.all_reduce(total)
            # It lies somewhere in PyTorch's flat tensor.
            distance = (their_errors.unfold(0, total.numel(), 1) - total.reshape(-1)).abs().amax(1).min()
            assert float(distance) < 10 * tolerance * float(total.abs().max()), key
    registration.remove()


def _mean(gradient: Tensor) -> Tensor:
    mean = gradient / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


OPTIONS: list[dict[str, Any]] = [
    {"batch_tensors_with_same_shape": True},
    {"use_error_feedback": False},
    {"warm_start": False},
    {"use_error_feedback": False, "warm_start": False},
]
# In float32 two orders of summation differ by 1e-7 at first, which 10 dependent steps let grow.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}


def _matrix(rank: int, world_size: int) -> dict[str, str]:
    failed = {}
    for dtype, tolerance in TOLERANCES.items():
        for options in OPTIONS if dtype == torch.float64 else OPTIONS[:1]:
            try:
                _compare(rank, dtype, tolerance, options)
            except AssertionError as error:
                failed[f"{options}, {dtype}"] = str(error)
    return failed


def test_outputs_statistics_and_sums_of_residuals_are_pytorchs() -> None:
    for failed in run_ranks(_matrix, 2, timeout_s=120):
        assert not failed, failed


def test_arguments_are_pytorchs() -> None:
    def parameters(of: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [
            (name, parameter.default)
            for name, parameter in inspect.signature(of).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]

    assert parameters(PowerSGDState) == parameters(theirs.PowerSGDState)


def test_attributes_are_pytorchs_except_internal_ones() -> None:
    state = PowerSGDState(None, 2, 5)
    missing = {name for name in theirs.PowerSGDState.__slots__ if not hasattr(state, name)}
    assert missing == {"rng", "p_memory_dict", "q_memory_dict", "next_stats_report"}
