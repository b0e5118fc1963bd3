"""Sharded updates through wires equal what is worked out by hand, bit for bit, and all ranks have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from wires_by_hand import ByHand, by_hand, made, parameters_of, true_of

from harness import assert_parity, bucket_calls, run_ranks, wrap
from harness.models import DTYPES, EMPTY, FROZEN, MLP, TIED, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import BFloat16, Float8, Int4, Int8, TopK, ZeroStep

STEPS = 4
BOTH: dict[str, Any] = {"reduce_wire": Int4(), "gather_wire": Int8(), "error_feedback": True}
DEFERRED = {"deferred": True}
FORWARD = {"gather": "forward"}
WHOLE = {"partition": "parameter"}

# The arguments of the stage, and of the optimizer.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both, feedback": (BOTH, {}),
    "reduce alone": ({"reduce_wire": Int8(chunk=64)}, {}),
    "reduce alone, feedback, whole": ({"reduce_wire": Int4(), "error_feedback": True}, WHOLE),
    "gather alone": ({"gather_wire": Int4(chunk=32)}, {}),
    "both, whole, in forward": (BOTH | FORWARD, WHOLE),
    "both, deferred": (BOTH | DEFERRED, {}),
    "both, deferred, in forward": (BOTH | DEFERRED | FORWARD, {}),
    "both, automatic, clipped": (BOTH | {"automatic": True, "clip_grad_norm": 1e9}, {}),
    "stochastic": (
        {"reduce_wire": Int4(rounding="stochastic"), "gather_wire": Int8(), "error_feedback": True},
        {},
    ),
    "top-k and float8": ({"reduce_wire": TopK(0.1), "gather_wire": Float8(), "error_feedback": True}, {}),
    "bfloat16": ({"reduce_wire": BFloat16(), "gather_wire": BFloat16()}, {}),
}


def check(ddp: Any, zero: Any, stage: Any, reference: ByHand, *, what: str) -> None:
    """The parameters, this rank's true weights and its errors."""
    zero.wait()
    ours, theirs = parameters_of(ddp), {name: p.detach().clone() for name, p in reference.public.items()}
    assert_parity(ours, theirs, what=f"parameters, {what}")
    if stage.gather_wire is not None:
        for name, start, part in true_of(ddp, zero):
            true = reference.true[name].detach().view(-1)[start : start + part.numel()]
            assert torch.equal(part, true), f"true weights of {name}, {what}"
    if stage.error_feedback:
        mine = stage.state_dict()["error"]
        assert_parity(mine, reference.errors[zero.rank], what=f"errors, {what}")


def train(ddp: Any, zero: Any, case: Case, rank: int, step: int, form: Mapping[str, Any]) -> None:
    mean_squared_error(ddp, case.batch(step, rank)).backward()
    if not form.get("automatic"):
        zero.step()


def _by_hand(rank: int, world_size: int, case: Case, names: list[str], options: dict[str, Any]) -> None:
    for name in names:
        form, of_zero = FORMS[name]
        ddp = wrap(case.model(), **case.ddp_options())
        zero, stage, cuts = made(ddp, form=form, **of_zero, **options)
        reference = by_hand(case, world_size, ddp, zero, stage, **options)
        with bucket_calls(ZeroStep) as calls:
            for step in range(STEPS):
                train(ddp, zero, case, rank, step, form)
                reference.step(step, cuts.passes[step])
                check(ddp, zero, stage, reference, what=f"{name}, step {step}, {world_size} ranks")
        assert len(calls) == sum(map(len, cuts.passes)) and len(cuts.passes[-1]) > 2


AT_THREE_RANKS = ["both, feedback", "both, whole, in forward", "gather alone"]


@pytest.mark.parametrize(("world_size", "forms"), [(2, list(FORMS)), (3, AT_THREE_RANKS)], ids=["2 ranks", "3 ranks"])
def test_every_form_equals_the_same_by_hand(world_size: int, forms: list[str]) -> None:
    run_ranks(_by_hand, world_size, MLP, forms, {})


def test_models_of_every_kind_equal_the_same_by_hand() -> None:
    def both(rank: int, world_size: int) -> None:
        for case in (TIED, FROZEN, EMPTY, UNUSED_ON_SOME_RANKS):
            _by_hand(rank, world_size, case, ["both, feedback"], {})
        for options in ({}, {"master_dtype": torch.float32}):
            _by_hand(rank, world_size, DTYPES, ["both, feedback", "gather alone", "both, deferred"], options)

    run_ranks(both, 2)


def _join(rank: int, world_size: int, join: Any) -> None:
    batches = (5, 3, 2)[:world_size]
    for form in (BOTH, BOTH | DEFERRED | FORWARD):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero, stage, cuts = made(ddp, form=form)
        reference = by_hand(MLP, world_size, ddp, zero, stage)
        with join([ddp, zero]):
            for step in range(batches[rank]):
                train(ddp, zero, MLP, rank, step, form)
        assert len(cuts.passes) == max(batches), "a rank without inputs takes part"
        for step in range(max(batches)):
            joined = [other for other, count in enumerate(batches) if count <= step]
            reference.step(step, cuts.passes[step], joined=joined)
        check(ddp, zero, stage, reference, what=f"{join.__module__}, {form}, rank {rank}")


@pytest.mark.parametrize("library", ["torch", "overlap"])
def test_a_rank_that_has_run_out_of_inputs_delivers_what_its_messages_left_out(library: str) -> None:
    def run(rank: int, world_size: int) -> None:
        from torch.distributed.algorithms.join import Join

        import overlap

        _join(rank, world_size, Join if library == "torch" else overlap.Join)

    run_ranks(run, 3)


def _one(rank: int, world_size: int) -> None:
    plain, ddp = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
    with_wires, _, _ = made(ddp, form=BOTH)
    without, _, _ = made(plain, form={})
    for step in range(3):
        train(ddp, with_wires, MLP, rank, step, BOTH)
        train(plain, without, MLP, rank, step, {})
    assert_parity(parameters_of(ddp), parameters_of(plain), what="one rank, with wires and without")
    assert dist.get_world_size() == 1


def test_nothing_is_rounded_on_one_rank() -> None:
    run_ranks(_one, 1)
