"""Every reducer on every attachment; what is refused; and errors, which reach all ranks and leave nothing behind."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlap
from harness import on_ranks
from overlap.ranks.board import of_all_ranks

from .given import (
    Case,
    assert_same,
    local,
    mesh_of,
    optimizer_of,
    raised_by,
    run,
    sharded,
    step_of,
    values,
    words_of,
)


@overlap.reducer
async def _own(bucket: overlap.Bucket) -> None:
    await overlap.hooks.all_reduce(bucket.buffer, group=bucket.group)
    bucket.buffer.div_(bucket.divisor)


REDUCERS = {
    "Cast": lambda: overlap.Cast(torch.bfloat16),
    "Int8": lambda: overlap.Quantize(overlap.Int8()),
    "Int4, feedback": lambda: overlap.Quantize(overlap.Int4(), error_feedback=True),
    "TopK, feedback": lambda: overlap.Quantize(overlap.TopK(0.25), error_feedback=True),
    "PowerSGD": lambda: overlap.PowerSGD(rank=1, min_compression_rate=1),
    "route": lambda: overlap.route({"*.bias": overlap.AllReduce(), "*": overlap.Quantize(overlap.Int8())}),
    "a function": lambda: _own,
    "a hook's name": lambda: overlap.hooks.bf16_compress_hook,
}


@pytest.mark.parametrize("attachment", ["hsdp", "replicate", "group"])
@on_ranks(4)
def test_every_reducer_trains_and_leaves_replicas_equal(rank: int, attachment: str) -> None:
    plain, _ = sharded(Case(attachment), native=True)
    optimizer = optimizer_of(plain, lr=0.05)
    expected = [step_of(plain, optimizer, 0, "partial" if step == 1 else "none") for step in range(3)]
    # How a unit reaches a reducer is the attachment's; all that a reducer does with it, a bucket, is the same.
    for name in REDUCERS if attachment == "hsdp" else ("Int4, feedback", "PowerSGD", "route", "a hook's name"):
        case, reducer = Case(attachment), REDUCERS[name]
        model, group = sharded(case)
        registration = overlap.register(model, reducer(), group=group)
        optimizer, losses = optimizer_of(model, lr=0.05), []
        for step in range(3):
            losses.append(step_of(model, optimizer, 0, "partial" if step == 1 else "none"))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert math.isfinite(float(local(norm)))
        distances = [abs(one - other) / other for one, other in zip(losses, expected, strict=True)]
        assert max(distances) < (0.5 if "feedback" in name or name == "PowerSGD" else 0.05), (name, distances)
        mine = [one.sum() for one in values(model)]
        of_replicas = of_all_ranks(mine, registration.runtime.context.group)
        assert all(mine == other for other in of_replicas), f"replicas differ with {name}"
        # After remove() the model reduces as it did, and takes another.
        registration.remove()
        assert not registration.is_active
        if attachment != "group":
            step_of(model, optimizer, 4)
        overlap.register(model, overlap.AllReduce(), group=group).remove()


@on_ranks(4)
def test_parameters_may_be_frozen_later_and_a_registration_removed(rank: int) -> None:
    frozen = "blocks.0.first.bias"
    assert_same(run(Case(), frozen=frozen), run(Case(), overlap.AllReduce(), frozen=frozen))
    model, _ = sharded(Case())
    registration = overlap.chain(overlap.hooks.NoReduction()).register(model)
    registration.remove()
    registration.remove()
    optimizer, found = optimizer_of(model), []
    for step in range(2):
        step_of(model, optimizer, step)
        found.append(values(model))
    assert_same(run(Case()), found)


@on_ranks(4)
def test_refusals_name_the_reason_and_the_remedy(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    texts, (model, group) = [], sharded(Case("group"))
    given = overlap.OverlappedOptimizer(optimizer_of(model))
    chains = (
        (overlap.AllReduce(), overlap.ClipGradNorm(1.0)),
        (overlap.AllReduce(), overlap.Step(given)),
        (overlap.hooks.PostLocal(overlap.hooks.PostLocalSGDState(None, None, 2), overlap.AllReduce()),),
        (overlap.hooks.as_stage(lambda state, bucket: None),),
    )
    texts += [raised_by(functools.partial(overlap.chain(*each).register, model, group=group)) for each in chains]
    register = functools.partial(overlap.register, model, overlap.AllReduce())
    texts.append(raised_by(register))
    texts.append(raised_by(functools.partial(register, group=dist.group.WORLD)))
    registration = register(group=group)
    texts.append(raised_by(functools.partial(register, group=group)))
    registration.remove()
    hsdp, _ = sharded(Case())
    texts.append(raised_by(lambda: overlap.register(hsdp, overlap.AllReduce(), group=group)))
    texts.append(raised_by(lambda: overlap.register(nn.Linear(2, 2), overlap.AllReduce(), group=group)))
    with torch.device("meta"):
        empty = fully_shard(nn.Linear(4, 4), mesh=mesh_of())
    texts.append(raised_by(lambda: overlap.register(empty, overlap.AllReduce())))
    texts.append(raised_by(lambda: overlap.register(nn.Sequential(hsdp), overlap.AllReduce())))
    # Refused on one rank alone: on all.
    one = overlap.chain(overlap.AllReduce(), overlap.ClipGradNorm(1.0)) if rank == 1 else overlap.AllReduce()
    other = overlap.Cast(torch.float16 if rank == 2 else torch.bfloat16)
    texts += [raised_by(functools.partial(overlap.register, hsdp, stage)) for stage in (one, other)]
    # Nothing of all that is left.
    overlap.register(hsdp, overlap.AllReduce())
    optimizer, found = optimizer_of(hsdp), []
    for step in range(2):
        step_of(hsdp, optimizer, step)
        found.append(values(hsdp))
    assert_same(run(Case()), found)
    expected = (
        ("ClipGradNorm(1) cannot be registered under FSDP", "torch.nn.utils.clip_grad_norm_"),
        ("Step(SGD, interleaved) cannot be registered", "optimizer.step() after backward"),
        ("PostLocal", "cannot be registered"),
        ("as_stage(<lambda>) cannot be registered", "Cast(torch.bfloat16)"),
        ("no replicate dimension", "or give group="),
        ("other shards of the same parameters", 'mesh.get_group("replicate")'),
        ("RegistrationError: this model has AllReduce() registered already", ".remove()"),
        ("by itself", "leave group= out"),
        ("RegistrationError: group= is for a model that fully_shard shards", "process_group=group"),
        ("on the meta device", "to_empty"),
        ("its .0 is sharded", "fully_shard(model) for the root"),
    )
    for text, words in zip(texts, expected, strict=False):
        assert all(word in text for word in words), text
    assert texts[11].startswith("ConfigurationError" if rank == 1 else "PeerError"), texts[11]
    assert texts[12] != "nothing"


@pytest.mark.parametrize("attachment", ["hsdp", "replicate", "group"])
@on_ranks(4)
def test_an_error_on_one_rank_is_one_on_all_and_training_goes_on(rank: int, attachment: str) -> None:
    fails = {"at": -1}

    @overlap.reducer
    async def failing(bucket: overlap.Bucket) -> None:
        if rank == 3 and bucket.step == fails["at"] and bucket.index == 1:
            raise ValueError("of this rank's own")
        await _own(bucket)

    model, group = sharded(Case(attachment))
    overlap.register(model, failing, group=group)
    optimizer, texts = optimizer_of(model), []
    step_of(model, optimizer, 0)
    fails["at"] = 1
    try:
        step_of(model, optimizer, 7)
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")
    # An unused parameter.
    try:
        step_of(model, optimizer, 7, skip=True)
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")
    found = [values(model)]
    model.set_reduce_scatter_unused_params(True)
    for step in (1, 2):
        step_of(model, optimizer, step, skip=step == 2)
        found.append(values(model))
    # As if neither had been.
    native, _ = sharded(Case(attachment), native=True)
    native.set_reduce_scatter_unused_params(True)
    optimizer, plain = optimizer_of(native), []
    for step in range(3):
        step_of(native, optimizer, step, skip=step == 2)
        plain.append(values(native))
    assert_same(plain[1:], found[1:])
    assert texts[0] == "ValueError: of this rank's own" if rank == 3 else texts[0].startswith("PeerError"), texts
    assert rank == 3 or "rank " in texts[0]
    assert "set_reduce_scatter_unused_params(True)" in texts[1], texts


def _not_finite(rank: int, ranks: int, attachment: str, name: str) -> None:
    model, group = sharded(Case(attachment))
    registration = overlap.register(model, REDUCERS[name](), group=group)
    optimizer = optimizer_of(model)
    step_of(model, optimizer, 0)
    step_of(model, optimizer, 1)
    with torch.no_grad():
        model(words_of(rank, 0))
    model(words_of(rank, 0))  # The step has been made.
    before = registration.stage.state_dict()
    rows = torch.ones(4)
    rows[3] = math.inf if rank == 1 else 1.0  # A row of the second shard alone.
    optimizer.zero_grad()
    model(words_of(rank, 2), rows=rows).backward()
    finite = all(bool(one.isfinite().all()) for one in values(model))
    assert all(of_all_ranks(finite, registration.runtime.context.group)) == finite
    assert overlap.hooks.stage.is_same_state(_errors(before), _errors(registration.stage.state_dict()))


def _errors(state: dict[str, Any]) -> Any:
    return {key: value for key, value in state.items() if key in ("error", "residuals", "factors")}


@on_ranks(4)
def test_a_gradient_of_one_shard_that_is_not_finite_is_discarded_by_all_shards(rank: int, world_size: int) -> None:
    for attachment, name in itertools.product(("hsdp", "group"), ("Int4, feedback", "PowerSGD")):
        _not_finite(rank, world_size, attachment, name)
