"""Every entry point given the thing that is beside the right one: an error says what to give, or it is taken."""

import copy
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from harness import assert_parity, on_ranks
from harness.third_party import Lookahead
from overlap import (
    AllReduce,
    Cast,
    ClipGradNorm,
    ConfigurationError,
    Int8,
    Join,
    LocalSGD,
    OptimizerHookState,
    OverlapError,
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    ReduceScatter,
    RegistrationError,
    SkipNonFinite,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    as_hook,
    as_stage,
    chain,
    declare,
    hook_then_optimizer,
    register,
)
from overlap._torch import classes
from overlap.optim import PeriodicModelAverager, PostLocalSGDOptimizer, average_parameters

Call = Callable[[Any], Any]


def _things(rank: int) -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    used = model.parameters()
    list(used)
    return SimpleNamespace(
        model=model,
        ddp=DistributedDataParallel(model),
        sgd=sgd,
        zero=ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        theirs=classes.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        averager=PeriodicModelAverager(4),
        averaging=PostLocalSGDOptimizer(sgd, PeriodicModelAverager(4)),
        used=used,
        others_group=[dist.new_group([one]) for one in range(2)][1 - rank],
    )


STEP = r"write chain\(AllReduce\(\), Step\(optimizer\)\)"


# By what is given: the call, and what the message says.
@declare("parameter")
class _Switched(torch.optim.SGD):
    """As schedule-free optimizers: parameters are others for evaluation."""

    def eval(self) -> None: ...


IN_A_CHAIN: dict[str, tuple[Call, str]] = {
    "an optimizer": (lambda of: of.sgd, f"SGD is not a stage: {STEP}"),
    "an OverlappedOptimizer": (lambda of: OverlappedOptimizer(of.sgd), f"OverlappedOptimizer is not a stage: {STEP}"),
    "an optimizer's step": (lambda of: of.sgd.step, STEP),
    "a sharded optimizer": (lambda of: of.zero, r"write chain\(ZeroStep\(zero\)\)"),
    "a stage's class": (lambda of: Step, r"Step is not a stage: it is a class; write Step\(\.\.\.\)"),
    "a wire": (lambda of: Int8(), r"Int8\(\) is not a stage: write Quantize\(Int8\(\)\)"),
    "a clip of the norm": (
        lambda of: torch.nn.utils.clip_grad_norm_,
        r"clip_grad_norm_ is not a stage: write ClipGradNorm\(max_norm\)",
    ),
    "a clip, partly bound": (
        lambda of: partial(torch.nn.utils.clip_grad_norm_, max_norm=1.0),
        r"ClipGradNorm\(max_norm\)",
    ),
    "a clip of values": (lambda of: torch.nn.utils.clip_grad_value_, r"bucket\.buffer\.clamp_\(-value, value\)"),
    "a module": (lambda of: of.model, "Sequential is not a stage: a stage is"),
    "a list": (
        lambda of: [AllReduce()],
        r"\[AllReduce\(\)\] is not a stage: .* chain\(\*stages\)",
    ),
    "a hook's state": (lambda of: PowerSGDState(None), r"as_stage\(hook, state\)"),
    "a function of two buckets": (lambda of: lambda one, two, three: None, "a stage is a function of one bucket"),
    "a name": (lambda of: "allreduce", "'allreduce' is not a stage: a stage is an overlap.Stage"),
}

# A remedy is Python, and keeps the other stages.
ORDERS: dict[str, tuple[Call, str]] = {
    "no reducer": (lambda of: chain(Step(of.sgd)), r"Write chain\(AllReduce\(\), Step\(optimizer\)\)"),
    "no reducer, other stages": (
        lambda of: chain(ClipGradNorm(1.0), SkipNonFinite(), Step(of.sgd, deferred=True)),
        r"Write chain\(AllReduce\(\), ClipGradNorm\(1\), SkipNonFinite\(\), Step\(optimizer, deferred=True\)\)",
    ),
    "no reducer, an update alone": (
        lambda of: register(of.ddp, Step(of.sgd, release_gradients=True)),
        r"register chain\(AllReduce\(\), Step\(optimizer, release_gradients=True\)\)",
    ),
    "the reducer last": (
        lambda of: chain(ClipGradNorm(1.0), Step(of.sgd), AllReduce()),
        r"write chain\(ClipGradNorm\(1\), AllReduce\(\), Step\(optimizer\)\)",
    ),
    "the sharded reducer last": (
        lambda of: chain(ZeroStep(of.zero), ReduceScatter(of.zero)),
        r"write chain\(ReduceScatter\(zero\), ZeroStep\(zero\)\)",
    ),
    "two reducers": (lambda of: chain(AllReduce(), PowerSGD(), Step(of.sgd)), "leave one of the two out"),
}

NOT_DDP = "is not a DistributedDataParallel model; "
ELSEWHERE: dict[str, tuple[Call, str]] = {
    "register, DataParallel": (lambda of: register(DataParallel(of.model), AllReduce()), f"{NOT_DDP}use Distributed"),
    "register, DDP inside": (lambda of: register(nn.Sequential(of.ddp), AllReduce()), f"{NOT_DDP}.*its .0: give that"),
    "register, the class": (
        lambda of: register(DistributedDataParallel, AllReduce()),
        f"class .*{NOT_DDP}give the",
    ),
    "register, an optimizer": (lambda of: register(of.ddp, of.sgd), STEP),
    "LocalSGD, sharded": (lambda of: LocalSGD(of.ddp, of.zero), "lets each rank train alone between averages"),
    "PostLocalSGDOptimizer, sharded": (
        lambda of: PostLocalSGDOptimizer(of.theirs, of.averager),
        "PyTorch's ZeroRedundancyOptimizer updates on each rank a part",
    ),
    "PostLocalSGDOptimizer, other way round": (
        lambda of: PostLocalSGDOptimizer(of.averager, of.sgd),
        "takes a ModelAverager, got SGD; make one",
    ),
    "hook_then_optimizer, an optimizer": (
        lambda of: hook_then_optimizer(allreduce_hook, of.sgd),
        r"takes an OptimizerHookState, got SGD: hook_then_optimizer\(hook, OptimizerHookState\(optimizer\)\)",
    ),
    "OptimizerHookState, a module": (lambda of: OptimizerHookState(of.model), r"torch\.optim\.Optimizer, got"),
    "chain, a stage without code": (
        lambda of: chain(type("Empty", (Stage,), {})()),
        r"Empty\(\) does nothing: give its class an async __call__",
    ),
    "as_hook, a hook": (lambda of: as_hook(allreduce_hook), "is a hook already"),
    "PowerSGDState, a model": (lambda of: PowerSGDState(of.ddp), "process_group is a process group .*got Distributed"),
    "sharded, a group without this rank": (
        lambda of: ZeroRedundancyOptimizer(
            of.model.parameters(), torch.optim.SGD, process_group=of.others_group, lr=0.1
        ),
        "this rank is not in the group .* process_group",
    ),
    "average_parameters, a model": (lambda of: average_parameters(of.model), r"give model\.parameters\(\)"),
    "average_parameters, a used iterator": (lambda of: average_parameters(of.used), "an iterator yields only once"),
    "Join, a model": (lambda of: Join(of.ddp), r"joinables is a list, as in Join\(\[ddp, optimizer\]\)"),
    "Join, a model twice": (lambda of: Join([of.ddp, of.ddp]), "is given twice"),
    "Step, the sharded optimizer": (lambda of: Step(of.zero), r"use ZeroStep\(zero\)"),
    "ZeroRedundancyOptimizer, a class that is switched": (
        lambda of: ZeroRedundancyOptimizer(of.model.parameters(), _Switched, lr=0.1),
        r"train\(\) and eval\(\), .* use chain",
    ),
    "ZeroStep, a plain optimizer": (lambda of: ZeroStep(of.sgd), r"use chain\(AllReduce\(\), Step\(optimizer\)\)"),
    "Cast, a name": (lambda of: Cast("bf16"), "a floating-point torch.dtype such as torch.bfloat16, got 'bf16'"),
    "Cast, a wire": (lambda of: Cast(Int8()), r"got Int8\(\); Quantize\(Int8\(\)\) sends a wire"),
    "sharded, a class that wraps": (
        lambda of: ZeroRedundancyOptimizer(of.model.parameters(), Lookahead, k=2),
        r"write Lookahead\(zero\), with ZeroStep\(zero, deferred=True\)",
    ),
    "register, twice": (
        lambda of: [register(of.ddp, AllReduce()) for _ in range(2)],
        r"first call \.remove\(\) on what register returned, or make one chain of both",
    ),
    "Step, a class": (lambda of: Step(torch.optim.SGD), r"got the class SGD; make one, as in torch\.optim\.SGD\(ddp"),
    "Step, deferred by a name": (lambda of: Step(of.sgd, deferred="yes"), "deferred is True, False or None, got 'yes'"),
}


def _refused(rank: int, world_size: int) -> None:
    of = _things(rank)
    calls = {f"chain, {name}": (partial(_chain, make), said) for name, (make, said) in IN_A_CHAIN.items()}
    wrong = []
    for name, (call, said) in (calls | ORDERS | ELSEWHERE).items():
        try:
            with pytest.raises(OverlapError, match=said):
                call(of)
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def _chain(make: Call, of: Any) -> None:
    chain(AllReduce(), make(of))


def _of_pytorchs_kind(rank: int, world_size: int) -> None:
    iterable = "'float' object is not iterable"
    for params, kind, said in ((1.2, TypeError, iterable), (torch.randn(1), TypeError, ""), ([], ValueError, "")):
        with pytest.raises(kind, match=rf"params is ddp\.parameters\(\).*{said}"):
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


def _stage_given_to_ddp(rank: int, world_size: int) -> None:
    ddp = _things(rank).ddp
    for stage, call in ((PowerSGD(rank=2), r"chain\(PowerSGD\(rank=2\)\)"), (chain(AllReduce()), r"call chain\(AllR")):
        with pytest.raises(RegistrationError, match=rf"{call}.*register\(ddp\); .*overlap\.as_hook\("):
            ddp.register_comm_hook(None, stage)
        with pytest.raises(RegistrationError, match=r"overlap\.as_hook\("):
            stage.__qualname__  # noqa: B018 (Lightning logs it before it registers.)
        assert not hasattr(stage, "__qualname__") and list(inspect.signature(stage).parameters) == ["bucket"]
        assert functools.wraps(stage)(lambda bucket: None).__wrapped__ is stage  # type: ignore[attr-defined]
        copied = pickle.loads(pickle.dumps(stage))
        with register(ddp, stage):
            for copies in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=r"is registered with a model.*overlap\.state_dict.*\.remove\(\)"):
                    copies(stage)
        register(ddp, copied).remove()
    assert not hasattr(PowerSGD(), "no_such_thing")
    register(ddp, AllReduce()).remove()  # Nothing was registered.


@on_ranks(2)
def test_what_is_beside_the_right_argument_is_refused_with_the_call_that_was_meant(rank: int, world_size: int) -> None:
    for case in (_refused, _of_pytorchs_kind, _stage_given_to_ddp):
        case(rank, world_size)


def test_what_pytorch_takes_is_taken() -> None:
    reducer = AllReduce()
    assert as_stage(reducer) is reducer
    with pytest.raises(ConfigurationError, match=r"keeps its own state|cannot|is not a hook"):
        as_stage(reducer, "a state")


# A compiled model --------------------------------------------------------------------------------------------


def _train(how: str, form: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    ddp: Any = DistributedDataParallel(model)
    given = torch.compile(ddp, backend="aot_eager") if how == "compiled" else ddp
    if how == "compiled in place":
        ddp.compile(backend="aot_eager")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any
    if form == "Step":
        optimizer = OverlappedOptimizer(sgd)
        chain(AllReduce(), Step(optimizer)).register(given)
    else:
        optimizer = LocalSGD(given, sgd, period=2, start_step=2)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() + 9 * i)) for i in range(5)]
    with Join([given, optimizer], enable=form != "LocalSGD") as join:
        for batch in join.iterate(batches):
            if form != "Step":
                optimizer.zero_grad()
            given(batch).square().mean().backward()
            optimizer.step()
    return [*(p.detach().clone() for p in model.parameters()), *model.buffers()]


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, timeout_s=150, group_timeout_s=100)
def test_a_compiled_ddp_model_is_taken_wherever_the_model_is(rank: int, world_size: int) -> None:
    for form in ("Step", "LocalSGD"):
        reference = _train("as it is", form)
        for how in ("compiled", "compiled in place"):
            # The compiler's, of tensors between the parts of a graph, where a forward waits for parameters.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                got = _train(how, form)
            assert_parity(got, reference, what=f"{form}, {how}", rtol=1e-5, atol=1e-6, reason="compiled kernels")
