"""Updates on the CPU, of parameters on streams: no race, no wait of the host but where it must, plain DDP's values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import assert_parity, run_ranks
from harness.streams import STREAMS_BACKEND, detecting
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    Int8,
    SkipNonFinite,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)
from overlap._torch.device import streams_replaced
from overlap.optim import AdamW8bit

from . import loops
from .at_once import AtOnce
from .builds import MUON
from .loops import Game
from .model import Net, Unused, batch, matrices, rest, wrapped
from .mutants import Mutant, mutated
from .play import outcome_of, play
from .scenario import Scenario

# Where the host waits for gradients and verdicts that have gone down to it.
WAITS = ("overlap/optim/zero/offload.py:wait",)
VERDICT = "overlap/optim/zero/offload.py:stops"
# A fused kernel's count of steps is made on the device of its parameter, which stands for streams here.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}


class _AtOnce:
    """Takes the place of the thread, whose operators the detector does not see: a job runs where it is submitted."""

    def submit(self, job: Callable[[], None]) -> None:
        with torch.no_grad():
            job()


def _offloaded(*stages: Any, cls: Any = None, zero: dict[str, Any] | None = None, **options: Any) -> Any:
    def build(ddp: Any) -> list[Any]:
        arguments = ADAMW if cls is None else {}
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), cls or torch.optim.AdamW, **{"offload": True, **arguments, **(zero or {})}
        )
        if optimizer.offload is not None:
            optimizer.offload._worker = _AtOnce()
        chain(*(make() for make in stages), ZeroStep(optimizer, **options)).register(ddp)
        return [optimizer]

    return build


def _alone(ddp: Any) -> list[Any]:
    """No stage of its own: a chain averages, and the loop's ``step()`` does the rest."""
    chain(AllReduce()).register(ddp)
    return [ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, offload=True, **ADAMW)]


def _two(ddp: Any) -> list[Any]:
    muon = ZeroRedundancyOptimizer(matrices(ddp), torch.optim.Muon, lr=0.02, offload=True)
    adamw = ZeroRedundancyOptimizer(rest(ddp), torch.optim.AdamW, **ADAMW)
    if muon.offload is not None:
        muon.offload._worker = _AtOnce()
    chain(ZeroStep(muon), ZeroStep(adamw)).register(ddp)
    return [muon, adamw]


def _both(ddp: Any) -> list[Any]:
    return [MUON(matrices(ddp)), torch.optim.AdamW(rest(ddp), **ADAMW)]


def _plain(ddp: Any) -> list[Any]:
    return [torch.optim.AdamW(ddp.parameters(), **ADAMW)]


@declare("element")
class _Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a count of its steps, so that all must be stepped in one call."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / self.steps)


def _counting(ddp: Any) -> list[Any]:
    return [_Counting(ddp.parameters())]


def _edits(game: Game) -> None:
    """The loop writes parameters between steps, also through ``.data``."""
    for number in range(4):
        game.loss().backward()
        game.update()
        for parameter in game.ddp.parameters():
            (parameter.data if number % 2 else parameter.detach()).mul_(0.5)


def _overflows(game: Game) -> None:
    """The second loss is infinite on one rank, and the step is left out on both."""
    for number in range(4):
        loss = game.loss()
        (loss * float("inf") if number == 1 and game.rank == 0 else loss).backward()
        game.update()


_SMALL_BLOCKS = {"min_numel": 64, "block_numel": 64}
_SHARED = {"host_syncs": WAITS, "plain": _plain}
SCENARIOS: dict[str, Scenario] = {
    "interleaved": Scenario(build=_offloaded(), **_SHARED),
    "by parameter": Scenario(build=_offloaded(zero={"partition": "parameter"}), **_SHARED),
    "in the next forward": Scenario(build=_offloaded(gather="forward"), **_SHARED),
    "deferred": Scenario(build=_offloaded(deferred=True), **_SHARED),
    "deferred, in the next forward": Scenario(build=_offloaded(deferred=True, gather="forward"), **_SHARED),
    "automatic": Scenario(build=_offloaded(automatic=True), **_SHARED),
    "automatic, deferred": Scenario(build=_offloaded(automatic=True, deferred=True), **_SHARED),
    "alone": Scenario(build=_alone, **_SHARED),
    "clipped": Scenario(build=_offloaded(clip_grad_norm=0.1), as_on_host=False, host_syncs=WAITS),
    "clips the norm": Scenario(build=_offloaded(lambda: ClipGradNorm(0.1)), as_on_host=False, host_syncs=WAITS),
    # Compared with the same chain on the host, which leaves the step out.
    "skips": Scenario(build=_offloaded(SkipNonFinite), loop=_overflows, host_syncs=(*WAITS, VERDICT)),
    "skips, deferred": Scenario(
        build=_offloaded(SkipNonFinite, deferred=True), loop=_overflows, host_syncs=(*WAITS, VERDICT)
    ),
    # As without offload, the host reads the scaler's verdict where the kernel is not fused.
    "scaled": Scenario(
        build=_offloaded(deferred=True),
        loop=loops.scales,
        plain=_plain,
        host_syncs=(*WAITS, "overlap/optim/grad_scaler.py:skips_step"),
    ),
    "accumulates": Scenario(build=_offloaded(deferred=True), loop=loops.accumulates, **_SHARED),
    "edits": Scenario(build=_offloaded(), loop=_edits, **_SHARED),
    "edits, in the next forward": Scenario(build=_offloaded(gather="forward"), loop=_edits, **_SHARED),
    "views": Scenario(build=_offloaded(), ddp={"gradient_as_bucket_view": True}, **_SHARED),
    "unused": Scenario(build=_offloaded(deferred=True), model=Unused, ddp={"find_unused_parameters": True}, **_SHARED),
    "int8 down": Scenario(build=_offloaded(reduce_wire=Int8()), host_syncs=WAITS),
    # On the device: simulated streams are of all tensors, and its tables would be the device's for the CPU, too.
    "8 bits": Scenario(build=_offloaded(cls=AdamW8bit, zero={"offload": False, **_SMALL_BLOCKS})),
    "8 bits, in the next forward": Scenario(
        build=_offloaded(cls=AdamW8bit, gather="forward", zero={"offload": False, **_SMALL_BLOCKS})
    ),
    "counting": Scenario(build=_offloaded(cls=_Counting, deferred=True), plain=_counting, host_syncs=WAITS),
    "two": Scenario(build=_two, plain=_both, host_syncs=WAITS),
    "fails": Scenario(build=_offloaded(gather="forward", deferred=True), loop=loops.fails, **_SHARED),
    "joins": Scenario(
        build=_offloaded(),
        loop=loops.joins,
        as_on_host=False,
        host_syncs=(*WAITS, "overlap/join/participation.py:result"),
    ),
}


def _errors(rank: int, world_size: int, names: list[str]) -> list[str]:
    errors = []
    for name in names:
        outcome = outcome_of(SCENARIOS[name], rank)
        dist.barrier()
        errors += [f"{name}, rank {rank}: {outcome.error}"] if outcome.error else []
        assert (outcome.waits > 0) == (not name.startswith("8 bits")), f"{name}: nothing went to the CPU"
    return errors


@pytest.mark.parametrize("part", range(2))
def test_an_update_on_the_cpu_is_ordered_and_is_plain_ddps(part: int) -> None:
    for errors in run_ranks(_errors, 2, list(SCENARIOS)[part::2], backend=STREAMS_BACKEND, timeout_s=170):
        assert not errors, "\n\n".join(errors)


_OFFLOAD = "optim.zero.offload:"
MUTANTS: dict[str, Mutant] = {
    "the host does not wait for gradients": Mutant(
        f"{_OFFLOAD}_Trip.wait", "self._arrived.synchronize()", "pass", "interleaved"
    ),
    "the host does not wait for the verdict": Mutant(
        f"{_OFFLOAD}_Verdict.stops", "self._arrived.synchronize()", "pass", "skips"
    ),
}


def _found(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, mutant in MUTANTS.items():
        with mutated(mutant):
            report, _ = play(SCENARIOS[mutant.scenario], rank)
        found[name] = report.faults[0].kind if report.faults else ""
        dist.barrier()
    return found


def test_what_is_not_waited_for_is_found() -> None:
    for found in run_ranks(_found, 2, backend=STREAMS_BACKEND):
        assert set(found.values()) == {"race"}, found


def _pair(cls: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, ZeroRedundancyOptimizer]:
    ddp = wrapped(Net)
    if dtype != torch.float32:
        ddp = torch.nn.parallel.DistributedDataParallel(ddp.module.to(dtype), bucket_cap_mb=0.001)
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), cls, **options)


def _train(ddp: Any, zero: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    for tokens, target in batches:
        torch.nn.functional.mse_loss(ddp(tokens).float(), target).backward()
        zero.step()


CASES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "fp32": (torch.float32, {}, {}),
    "16 bits": (torch.bfloat16, {}, {}),
    "masters": (torch.bfloat16, {"master_dtype": torch.float32}, {}),
    "by parameter": (torch.float32, {"partition": "parameter"}, {"gather": "forward"}),
    "deferred": (torch.float32, {}, {"deferred": True}),
}


def _trained(rank: int, world_size: int, offload: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "fused": True, "offload": offload}
    for name, (dtype, more, form) in CASES.items():
        with streams_replaced(AtOnce()):
            ddp, zero = _pair(torch.optim.AdamW, dtype=dtype, **options, **more)
            assert (zero.offload is not None) == offload
            registration = chain(ZeroStep(zero, **form)).register(ddp)
            _train(ddp, zero, [batch(step, rank) for step in range(4)])
            zero.consolidate_state_dict(to=None)
            saved = copy.deepcopy(zero.state_dict())
            assert all(value.device.type == "cpu" for state in zero.state.values() for value in state.values())
            # A new one goes on from there.
            registration.remove()
            other = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **options, **more)
            other.load_state_dict(saved)
            chain(ZeroStep(other, **form)).register(ddp)
            _train(ddp, other, [batch(step, rank) for step in range(4, 6)])
            other.wait()
            other.consolidate_state_dict(to=None)
            last = copy.deepcopy(other.state_dict())
            results[name] = [parameter.detach().clone() for parameter in ddp.parameters()], saved, last
    return results


def test_on_a_thread_of_its_own_and_saved_and_loaded_it_is_as_on_the_device() -> None:
    on_device, on_host = (run_ranks(_trained, 2, offload) for offload in (False, True))
    assert_parity(on_host, on_device, what="parameters and states")
    assert "master_param" in on_host[0]["masters"][1]["state"][0]
    assert "master_param" not in on_host[0]["fp32"][1]["state"][0]


@declare("element")
class _Failing(torch.optim.SGD):
    """Raises in its third step of one rank, once."""

    is_to_fail = False
    steps = 0

    def step(self, closure: Any = None) -> None:
        type(self).steps += 1
        if self.is_to_fail and type(self).steps == 3:
            raise ZeroDivisionError("of the optimizer")
        super().step()


def _fails(rank: int, world_size: int) -> str:
    _Failing.is_to_fail, _Failing.steps = rank == 1, 0
    batches = [batch(step, rank) for step in range(4)]
    ddp = wrapped(Net)
    with detecting():
        zero = ZeroRedundancyOptimizer(ddp.parameters(), _Failing, lr=0.1, offload=True, partition="element")
        _Failing.steps = 0  # A copy that was stepped to find out counts, too.
        assert zero.offload is not None
        zero.offload._worker = _AtOnce()
        chain(ZeroStep(zero)).register(ddp)
        try:
            _train(ddp, zero, batches)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_the_optimizer_is_raised_by_backward_and_stops_all_ranks() -> None:
    one, other = run_ranks(_fails, 2, backend=STREAMS_BACKEND, timeout_s=60)
    assert "ZeroDivisionError: of the optimizer" in other
    assert one, "the other rank went on alone"


def _refused(rank: int, world_size: int) -> None:
    with detecting():
        ddp, zero = _pair(torch.optim.AdamW, offload=True, **ADAMW)
        with pytest.raises(UnsupportedError, match=r"true weights .* leave out one of them"):
            chain(ZeroStep(zero, gather_wire=Int8())).register(ddp)
        with pytest.raises(ConfigurationError, match="capturable=True is for steps on an accelerator"):
            _pair(torch.optim.AdamW, offload=True, capturable=True)
    # On a CPU there is nothing to move.
    ddp, zero = _pair(torch.optim.AdamW, offload=True, **ADAMW)
    assert zero.offload is None
    weight = next(ddp.parameters())
    own = zero.shards[id(weight)].own
    assert own is not None and own.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_what_cannot_be_on_the_cpu_is_refused_and_on_a_cpu_it_changes_nothing() -> None:
    run_ranks(_refused, 2, backend=STREAMS_BACKEND)
