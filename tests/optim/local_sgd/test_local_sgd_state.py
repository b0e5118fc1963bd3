"""Saving and loading local SGD: in the middle of a round, for another number of ranks, for other settings."""

import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import local, run, sgd, values_of
from local_wires import errors_of

from harness import assert_equal_ranks, assert_parity, on_ranks, play, wrap
from harness.models import BATCH_NORM, MLP
from overlap import ConfigurationError, Int4, Int8, LocalSGD

STEPS = 16
STREAMING: dict[str, Any] = {
    "outer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "fragments": 2,
    "overlap": 2,
}
STOPS = {2: "before local SGD", 9: "with a pending average", 11: "within a round"}


def _file(ddp: Any, made: LocalSGD) -> bytes:
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "optimizer": made.state_dict()}, file)
    return file.getvalue()


def _resume(rank: int, world_size: int, what: str) -> None:
    wired: dict[str, Any] = {"wire": Int4(rounding="stochastic"), "error_feedback": True}
    options = {"streaming": STREAMING, "wired": wired, "wired, streaming": {**wired, **STREAMING}}[what]
    build: Any = functools.partial(LocalSGD, period=3, start_step=3, **options)
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    made = build(ddp, sgd(ddp.parameters()))
    whole, files = [], {}
    for step in range(STEPS):
        if step in STOPS:
            files[step] = _file(ddp, made)
        whole += run(BATCH_NORM, rank, [step], ddp, made)
    if "wired" in what:
        errors = errors_of(made)
        made.synchronize()
        assert_equal_ranks(values_of(ddp.module).values(), f"{what}, rounded stochastically")
    for stop, file in files.items():
        saved = torch.load(io.BytesIO(file), weights_only=True)
        assert (saved["optimizer"]["local_sgd"]["flight"] is not None) == (stop == 9 and "streaming" in what)
        fresh = wrap(BATCH_NORM.model(seed=5), **BATCH_NORM.ddp_options())
        optimizer = sgd(fresh.parameters())
        resumed = build(fresh, optimizer)
        fresh.module.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        assert resumed.param_groups is optimizer.param_groups and resumed.averager.step == stop
        rest = run(BATCH_NORM, rank, range(stop, STEPS), fresh, resumed)
        assert_parity(rest, whole[stop:], what=f"{what}, resumed {STOPS[stop]}")
        if "wired" in what:
            assert_parity(errors_of(resumed), errors, what=f"{what}, errors, resumed {STOPS[stop]}")


def _other_optimizers(rank: int, world_size: int) -> None:
    """A plain optimizer loads the state, and the other way round with a warning; other settings are refused."""
    build: Any = functools.partial(LocalSGD, period=3, start_step=0, **STREAMING)
    _, made, _ = local(MLP, rank, steps=4, build=build)
    saved = made.state_dict()
    assert made.averager.pending is not None
    sgd(MLP.model().parameters()).load_state_dict(saved)
    for options, match in (
        ({}, "another number of fragments"),
        ({"fragments": 2}, "saved with an outer optimizer, and this one has none"),
    ):
        other = wrap(MLP.model())
        with pytest.raises(ConfigurationError, match=match):
            LocalSGD(other, sgd(other.parameters()), 3, **options).load_state_dict(saved)  # type: ignore[arg-type]
    local_state = saved["local_sgd"]
    renamed = {f"other.{name}": one for name, one in local_state["flight"]["snapshots"].items()}
    faster = [{**group, "lr": 7.0} for group in saved["param_groups"]]
    strange = {**local_state, "step": 40, "flight": {**local_state["flight"], "snapshots": renamed}}
    with pytest.raises(ConfigurationError, match="of a model with other parameters"):
        made.load_state_dict({**saved, "param_groups": faster, "local_sgd": strange})
    assert made.averager.step == 4 and made.averager.pending is not None, "a refusal leaves no trace"
    assert [group["lr"] for group in made.param_groups] == [group["lr"] for group in saved["param_groups"]]
    made.load_state_dict(saved)
    with pytest.warns(UserWarning, match="stays at step 4"):
        made.load_state_dict(made.optim.state_dict())
    assert made.averager.step == 4 and made.averager.pending is not None


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
        if is_equal:
            more.load_state_dict(exact.state_dict())
            run(MLP, rank, range(2), wired, more)
            assert_equal_ranks(values_of(wired.module).values(), "with a wire from here")
        else:
            with pytest.raises(ConfigurationError, match=r"without a wire .* in the middle of a round"):
                more.load_state_dict(exact.state_dict())
    # Without a wire, or without error feedback, it would be lost.
    for options in ({}, {"wire": Int4()}):
        plain = wrap(MLP.model())
        with pytest.raises(ConfigurationError, match="the state has error feedback"):
            build(plain, sgd(plain.parameters()), **options).load_state_dict(states[rank])


CELLS: dict[str, Any] = {
    **{what: functools.partial(_resume, what=what) for what in ("streaming", "wired", "wired, streaming")},
    "other optimizers": _other_optimizers,
    "other ranks and other settings": _states,
}


@on_ranks(2, timeout_s=150)
def test_two_ranks(rank: int, world_size: int) -> None:
    play(CELLS, rank, world_size)
