"""Wrapped modules have the gradients and random numbers of plain ones, also in DDP and under torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from activations.wrappers import WRAPPERS
from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import BATCH_NORM, MLP, TRANSFORMER
from overlap import AllReduce, OverlappedOptimizer, Step, chain
from overlap.activations import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper, offloaded_bytes


class Block(nn.Module):
    """Dropout, several outputs, arguments by name, a buffer, a non-contiguous and an expanded tensor, a double."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.calls = [0]  # What a list holds is not undone when the forward runs again.

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool = False, debug: Any = None) -> tuple[Tensor, dict]:
        self.calls[0] += 1
        hidden = self.drop(self.norm(self.first(x)).relu()) * scale.expand_as(x)
        out = self.second(hidden.t().contiguous().t()) if flag else hidden
        return out, {"double": out.double().tanh(), "same": out.exp().t() @ out}


def _gradients(module: nn.Module, plain: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    plain.zero_grad()
    x, scale = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    out, more = module(x, scale=scale, flag=True, debug="ours")
    (out.sum() + more["double"].sum() + more["same"].square().mean()).backward()
    return [p.grad.clone() for p in (*plain.parameters(), x, scale)] + [torch.rand(3)]


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_and_random_numbers_are_equal_in_every_step(name: str) -> None:
    plain = Block()
    reference = _gradients(plain, plain)
    wrapped = WRAPPERS[name](plain)
    for _ in range(3):
        assert_parity(_gradients(wrapped, plain), reference, what=name)
    assert plain.calls[0] == 1 + 3 * (1 if name == "offload" else 2), "recomputed, or not"
    assert offloaded_bytes("cpu") == 0


@pytest.mark.parametrize("name", WRAPPERS)
def test_without_gradients_the_forward_runs_once(name: str) -> None:
    plain = Block()
    with torch.no_grad():
        WRAPPERS[name](plain)(torch.randn(4, 64), scale=torch.ones(64))
    assert plain.calls == [1]
    assert offloaded_bytes("cpu") == 0


def test_hooks_of_the_module_run_once() -> None:
    calls: list[str] = []
    plain = nn.Linear(2, 2)
    plain.register_forward_pre_hook(lambda *_: calls.append("before"))
    wrapped = checkpoint_wrapper(plain)
    wrapped.register_forward_hook(lambda *_: calls.append("after"))
    wrapped(torch.ones(1, 2)).sum().backward()
    assert calls == ["before", "after"]


# In DDP ------------------------------------------------------------------------------------------------------

CASES = {"MLP": MLP, "TRANSFORMER": TRANSFORMER, "BATCH_NORM": BATCH_NORM}


def _in_ddp(rank: int, world_size: int, case_name: str) -> None:
    case = CASES[case_name]
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    kinds = (nn.Linear, nn.Tanh) if case is MLP else (nn.TransformerEncoderLayer, nn.Linear)
    results = []
    for name in (None, "checkpoint", "offload"):
        model = case.model()
        if name is not None:
            assert apply_activation_checkpointing(
                model, lambda module: isinstance(module, kinds), checkpoint_wrapper_fn=WRAPPERS[name]
            )
        ddp = wrap(model, **case.ddp_options())
        optimizer = OverlappedOptimizer(sgd(ddp.parameters()))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        results.append(train(ddp, optimizer, case.batches(rank, steps=4), step_fn=overlapped_step, gradients=True))
    assert_parity(results[1], results[0], what=f"checkpointed, {case}")
    assert_parity(results[2], results[0], what=f"offloaded, {case}")


@pytest.mark.parametrize("case_name", CASES)
def test_in_ddp_with_a_chain_training_is_the_same_in_every_bit(case_name: str) -> None:
    run_ranks(_in_ddp, 2, case_name)


# Under torch.compile -----------------------------------------------------------------------------------------


def _compiled(rank: int, world_size: int, names: list[str], fullgraph: bool) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    plain(x).square().sum().backward()
    reference = [p.grad.clone() for p in plain.parameters()]
    for name in names:
        plain.zero_grad()
        torch._dynamo.reset()
        wrapped = nn.Sequential(WRAPPERS[name](plain), nn.Identity())
        torch.compile(wrapped, backend="aot_eager", fullgraph=fullgraph)(x).square().sum().backward()
        assert_parity(
            [p.grad for p in plain.parameters()],
            reference,
            what=f"{name}, compiled",
            exact=False,
            rtol=1e-5,
            atol=1e-6,
            reason="compiled code may add up in another order",
        )


def test_under_torch_compile_gradients_are_equal() -> None:
    run_ranks(_compiled, 1, list(WRAPPERS), False, backend=None)


def test_a_checkpointed_module_is_compiled_as_one_graph() -> None:
    run_ranks(_compiled, 1, ["checkpoint"], True, backend=None)


def _as_one_graph(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        torch._dynamo.reset()
        wrapped = nn.Sequential(WRAPPERS[name](nn.Linear(16, 16)), nn.Identity())
        compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="hooks on saved tensors, which are not traced"):
            compiled(torch.randn(8, 16))


def test_with_fullgraph_what_offloads_is_an_error_that_says_why() -> None:
    run_ranks(_as_one_graph, 1, [name for name in WRAPPERS if name != "checkpoint"], backend=None)


# On a GPU ----------------------------------------------------------------------------------------------------


def _on_gpu(rank: int, world_size: int) -> list[int]:
    peaks = []
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)) for _ in range(16))).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    reference: list[Tensor] = []
    for wrapper in (lambda module: module, offload_wrapper, checkpoint_wrapper, WRAPPERS["both"]):
        model = nn.Sequential(*(wrapper(block) for block in plain))
        for _ in range(4):  # Buffers of the first step are used again in the next, while copies are under way.
            torch.manual_seed(3)
            plain.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
            got = [p.grad.clone() for p in plain.parameters()]
            if not reference:
                reference = got
            else:
                assert all(torch.equal(one, other) for one, other in zip(got, reference, strict=True))
        peaks.append(peak)
    assert offloaded_bytes() == 0
    return peaks


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_equal_and_the_peak_is_lower() -> None:
    ((plain, offloaded, checkpointed, both),) = run_ranks(_on_gpu, 1, backend=None, timeout_s=120)
    print(f"peak MB: {plain >> 20} plain, {offloaded >> 20} offloaded, {checkpointed >> 20}, {both >> 20} both")
    assert offloaded < 0.8 * plain and checkpointed < 0.8 * plain and both < 0.8 * plain


@pytest.mark.gpu
def test_copies_go_on_beside_the_computation() -> None:
    def overlapping(rank: int, world_size: int) -> int:
        from torch.profiler import ProfilerActivity, profile

        block = offload_wrapper(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda())
        x = torch.randn(8192, 2048, device="cuda")
        block(x).sum().backward()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            block(x).sum().backward()
            torch.cuda.synchronize()
        events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
        copies = [event for event in events if "Memcpy" in event.name]
        kernels = [event for event in events if "Memcpy" not in event.name]
        return sum(
            any(k.time_range.start < c.time_range.end and c.time_range.start < k.time_range.end for k in kernels)
            for c in copies
        )

    (beside,) = run_ranks(overlapping, 1, backend=None, timeout_s=120)
    assert beside >= 4
