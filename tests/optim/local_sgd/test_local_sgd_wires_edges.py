"""Local SGD through a wire: uneven inputs, resuming, failures, numbers that are not finite, dtypes, refusals."""

from __future__ import annotations

import functools
import io
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import assign, local, run, sgd, values_of
from local_wires import gathered, sum_by_hand
from test_local_sgd_wires import assert_equal_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError, Int4, Int8, PeerError, UnsupportedError, Wire
from overlap.hooks.wires import Codec
from overlap.optim.local_sgd import LocalSGD

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def errors_of(made: LocalSGD) -> dict[str, Tensor]:
    errors: dict[str, Tensor] = made.state_dict()["local_sgd"]["wire"]["error"]
    return errors


# Uneven inputs.

BATCHES, PERIOD = (9, 4, 6), 4


def _trained_by_hand(world_size: int, wire: Wire) -> dict[str, Tensor]:
    """All ranks' training on each of them; a rank counts for its steps, and what it left out still goes out."""
    models = [MLP.model() for _ in range(world_size)]
    optimizers = [sgd(model.parameters()) for model in models]
    names = list(dict(models[0].named_parameters()))
    anchor = _flat(models[0])
    errors = [torch.zeros_like(anchor) for _ in models]
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        steps = [max(0, min(end, BATCHES[other]) - begin) for other in range(world_size)]
        for other, model in enumerate(models):
            for step in range(begin, begin + steps[other]):
                optimizers[other].zero_grad()
                mean_squared_error(model, MLP.batch(step, other)).backward()
                optimizers[other].step()
        changes = []
        for model, own, error in zip(models, steps, errors, strict=True):
            change = _flat(model) - anchor
            change = change / sum(steps) if own == 1 else change * (own / sum(steps))
            changes.append(change + error)
        total, errors = sum_by_hand(wire, changes)
        anchor = anchor + total
        sizes = [p.numel() for p in models[0].parameters()]
        for model in models:
            named = dict(model.named_parameters())
            pieces = zip(names, anchor.split(sizes), strict=True)
            assign(model, {name: piece.view(named[name].shape) for name, piece in pieces})
    return values_of(models[0])


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _uneven(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), PERIOD, 0, wire=Int4(), error_feedback=True)
    with Join([ddp, made]):
        run(MLP, rank, range(BATCHES[rank]), ddp, made)
    assert_parity(values_of(ddp.module), _trained_by_hand(world_size, Int4()), what="uneven inputs")
    # Ranks run out of inputs before local SGD starts, and with an average under way.
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    options: dict[str, Any] = {"wire": Int4(), "error_feedback": True, "outer": OUTER, "fragments": 2, "overlap": 1}
    made = LocalSGD(ddp, sgd(ddp.parameters()), 2, 5, **options)
    with Join([ddp, made]):
        run(MLP, rank, range(BATCHES[rank]), ddp, made)
    assert_equal_ranks(ddp.module, "uneven inputs, from step 5")
    run(MLP, rank, range(3), ddp, made)
    made.synchronize()
    assert_equal_ranks(ddp.module, "and on it goes")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_inputs_still_sends_what_it_left_out(world_size: int) -> None:
    run_ranks(_uneven, world_size)


# Saving and loading.

STEPS = 16
STREAMING = {"outer": OUTER, "fragments": 2, "overlap": 2}


def _resume(rank: int, world_size: int) -> None:
    wire = Int4(rounding="stochastic")
    for what, options in {"average": {}, "streaming DiLoCo": STREAMING}.items():
        build: Any = functools.partial(LocalSGD, period=3, start_step=3, wire=wire, error_feedback=True, **options)
        ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
        made = build(ddp, sgd(ddp.parameters()))
        whole, files = [], {}
        for step in range(STEPS):
            if step in (2, 9, 11):
                files[step] = io.BytesIO()
                torch.save({"model": ddp.module.state_dict(), "optimizer": made.state_dict()}, files[step])
            whole += run(BATCH_NORM, rank, [step], ddp, made)
        for stop, file in files.items():
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            assert ("error" in saved["optimizer"]["local_sgd"]["wire"]) == (stop > 2)
            fresh = wrap(BATCH_NORM.model(seed=5), **BATCH_NORM.ddp_options())
            resumed = build(fresh, sgd(fresh.parameters()))
            fresh.module.load_state_dict(saved["model"])
            resumed.load_state_dict(saved["optimizer"])
            rest = run(BATCH_NORM, rank, range(stop, STEPS), fresh, resumed)
            assert_parity(rest, whole[stop:], what=f"{what}, resumed after step {stop}")
            assert_parity(errors_of(resumed), errors_of(made), what=f"{what}, left out, resumed after step {stop}")


def test_resume_is_exact() -> None:
    run_ranks(_resume, 2)


def _states(rank: int, world_size: int) -> None:
    build: Any = functools.partial(LocalSGD, period=2, start_step=0)
    _, made, ddp = local(MLP, rank, steps=3, build=functools.partial(build, wire=Int4(), error_feedback=True))
    states: list[Any] = [None] * world_size

    def gather() -> None:
        dist.all_gather_object(states, made.state_dict())

    gather()
    with pytest.raises(ConfigurationError, match="middle of a round"):
        LocalSGD.redistribute(states, rank=0, ranks=1)
    made.synchronize()
    gather()
    # Another number of ranks delivers what was left out, and no more than that.
    left_out = {name: states[0]["local_sgd"]["wire"]["error"][name] for name in errors_of(made)}
    left_out = {name: error + states[1]["local_sgd"]["wire"]["error"][name] for name, error in left_out.items()}
    assert any(error.any() for error in left_out.values())
    three = [LocalSGD.redistribute(states, rank=new, ranks=3)["local_sgd"]["wire"]["error"] for new in range(3)]
    assert_parity(
        {name: sum(one[name] for one in three if name in one) for name in left_out}, left_out, what="three ranks"
    )
    solo = [dist.new_group([0]), dist.new_group([1])][rank]
    fresh = wrap(MLP.model(), process_group=solo)
    resumed = build(fresh, torch.optim.SGD(fresh.parameters(), lr=0.0), wire=Int8(), error_feedback=True)
    before = values_of(ddp.module)
    fresh.module.load_state_dict(ddp.module.state_dict())
    for other in (states[rank], LocalSGD.redistribute(states, rank=1, ranks=3)):
        with pytest.raises(ConfigurationError, match=r"LocalSGD.redistribute\(states, rank=0, ranks=1\)"):
            resumed.load_state_dict(other)
    resumed.load_state_dict(LocalSGD.redistribute(states, rank=0, ranks=1))
    resumed.param_groups[0].update(lr=0.0, weight_decay=0.0)
    run(MLP, rank, range(2), fresh, resumed)
    expected = {name: value + left_out[name] for name, value in before.items()}
    assert_parity(values_of(fresh.module), expected, what="one rank gets what was left out")
    assert not any(error.any() for error in errors_of(resumed).values())
    # A run may go on with a wire from where ranks are equal, and only from there.
    _, exact, model = local(MLP, rank, steps=3, build=build)
    for is_equal in (False, True):
        if is_equal:
            exact.synchronize()
        wired = wrap(MLP.model())
        more = build(wired, sgd(wired.parameters()), wire=Int8())
        wired.module.load_state_dict(model.module.state_dict())
        more.load_state_dict(exact.state_dict())
        if is_equal:
            run(MLP, rank, range(2), wired, more)
            assert_equal_ranks(wired.module, "with a wire from here")
        else:
            with pytest.raises(ConfigurationError, match="began the round with different parameters"):
                run(MLP, rank, range(2), wired, more)
    # Without a wire, or without error feedback, it would be lost.
    for options in ({}, {"wire": Int4()}):
        plain = wrap(MLP.model())
        with pytest.raises(ConfigurationError, match="still to be delivered"):
            build(plain, sgd(plain.parameters()), **options).load_state_dict(states[rank])


def test_states_for_other_ranks_and_other_settings() -> None:
    run_ranks(_states, 2)


# What goes wrong.


@dataclass(frozen=True)
class _RaisesWhenArmed(Wire):
    """Int4, which raises in the second message while it is armed."""

    armed: list[int]

    def codec(self, numel: int) -> Codec:
        if self.armed:
            self.armed[0] -= 1
            if not self.armed[0]:
                self.armed.clear()
                raise ValueError("armed")
        return Int4().codec(numel)

    def __repr__(self) -> str:
        return "_RaisesWhenArmed()"


def _failures(rank: int, world_size: int) -> None:
    for delay in (0, 1):
        wire = _RaisesWhenArmed([])
        build: Any = functools.partial(
            LocalSGD, period=2, start_step=0, wire=wire, error_feedback=True, overlap=delay, average_buffers=False
        )
        _, made, ddp = local(MLP, rank, steps=2 + delay, build=build)
        before = errors_of(made)
        wire.armed.append(1)
        with pytest.raises(ValueError, match="armed"):
            run(MLP, rank, range(2 + delay, 4 + 2 * delay), ddp, made)
        assert not wire.armed
        assert_parity(errors_of(made), before, what=f"overlap {delay}: what was left out, after a failed average")
        run(MLP, rank, range(4), ddp, made)
        made.synchronize()
        assert_equal_ranks(ddp.module, f"overlap {delay}, after a failed average")


def test_a_failed_average_changes_no_memory() -> None:
    run_ranks(_failures, 2)


def _one_fails(rank: int, world_size: int) -> None:
    wire = _RaisesWhenArmed([1] if rank == 1 else [])
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), 2, 0, wire=wire, error_feedback=True)
    began_s = time.monotonic()
    with pytest.raises(PeerError if rank == 0 else ValueError, match="armed"):
        run(MLP, rank, range(2), ddp, made)
    assert time.monotonic() - began_s < 15, "before the group's timeout"
    assert "error" not in made.state_dict()["local_sgd"]["wire"]


def test_a_failure_on_one_rank_is_told_to_the_others() -> None:
    run_ranks(_one_fails, 2)


def _not_finite(rank: int, world_size: int) -> None:
    for delay in (0, 1):
        build: Any = functools.partial(
            LocalSGD, period=2, start_step=0, wire=Int8(), error_feedback=True, overlap=delay
        )
        _, made, ddp = local(MLP, rank, steps=3, build=build)
        before = errors_of(made)
        if rank == 1:
            with torch.no_grad():
                next(ddp.parameters()).view(-1)[0] = float("nan")
        run(MLP, rank, [3] if not delay else [3, 4], ddp, made)
        assert_parity(errors_of(made), before, what=f"overlap {delay}: what was left out")
        assert next(ddp.parameters()).isnan().any(), "on every rank"


def test_a_parameter_that_is_not_finite_shows_on_every_rank_and_enters_no_memory() -> None:
    run_ranks(_not_finite, 2)


class _Mixed(nn.Module):
    """Parameters of several dtypes, one of them empty, and an integer buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, dtype in (
            ("two_bytes", torch.float16),
            ("brain_float", torch.bfloat16),
            ("four_bytes", None),
            ("eight_bytes", torch.float64),
        ):
            value = torch.randn(40, generator=generator).to(dtype or torch.float32)
            setattr(self, name, nn.Parameter(value))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("count", torch.tensor([rank]))
        self.register_buffer("mean", torch.full((3,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p.double() * x[: p.numel()]).sum() for p in self.parameters())  # type: ignore[return-value]


def _dtypes(rank: int, world_size: int) -> None:
    for dtype in (None, torch.float32):
        ddp = wrap(_Mixed(rank))
        module = ddp.module
        start = {name: p.detach().double() for name, p in module.named_parameters()}
        with torch.no_grad():
            module.mean.fill_(float(rank))
            module.count.fill_(rank)
        made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.25), 1, 0, wire=Int8(), average_dtype=dtype)
        made.zero_grad()
        ddp(torch.full((40,), 1.0 + rank, dtype=torch.float64)).backward()
        own = {name: (p.detach() - 0.25 * p.grad).double() for name, p in module.named_parameters()}
        made.step()
        assert_equal_ranks(ddp.module, f"average_dtype {dtype}")
        for name, p in module.named_parameters():
            mean = sum(gathered(own[name] - start[name])) / world_size + start[name]
            # Int8 rounds twice, by half a step of changes of about 0.5; then the parameter's dtype does.
            rounding = 0.5 / 127 + 2 * torch.finfo(p.dtype).eps * start[name].abs()
            assert (p.detach().double() - mean).abs().le(rounding).all(), f"{name}, average_dtype {dtype}"
        assert module.mean.tolist() == [0.5] * 3 and module.count.item() == rank, "buffers are exact, integers kept"


def test_parameters_of_every_real_dtype() -> None:
    run_ranks(_dtypes, 2)


# Refusals.


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"wire": Int8}, ConfigurationError, r"the class Int8; give a wire such as Int8\(\)"),
        ({"wire": 8}, ConfigurationError, r"wire is int; give a wire such as Int8\(\)"),
        ({"error_feedback": True}, ConfigurationError, "there is no wire"),
        ({"wire": Int8(), "error_feedback": 1}, ConfigurationError, "give True or False"),
        ({"wire": Int8(), "average_dtype": torch.float64}, ConfigurationError, "is summed in torch.float32"),
    ]
    for options, error, match in cases:
        with pytest.raises(error, match=match):
            LocalSGD(ddp, sgd(ddp.parameters()), **options)
    imaginary = wrap(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="weight is complex64: leave wire out"):
        LocalSGD(imaginary, torch.optim.SGD(imaginary.parameters(), lr=0.1), wire=Int8())
    assert repr(LocalSGD(ddp, sgd(ddp.parameters()), 8, 0, wire=Int4(), error_feedback=True)) == (
        "LocalSGD(SGD, period 8 from step 0, wire Int4(), error feedback)"
    )
    for different in ({"wire": Int8()}, {"outer": OUTER}):
        other = wrap(MLP.model())
        made = LocalSGD(other, sgd(other.parameters()), 2, 0, **different)  # type: ignore[arg-type]
        if rank == 1:
            with torch.no_grad():
                next(other.parameters()).add_(1.0)
        with pytest.raises(ConfigurationError, match=r"began the round with different parameters \(.*weight\)"):
            run(MLP, rank, range(2), other, made)


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(_refused, 2)
