"""Sharded updates through wires equal what is worked out by hand, bit for bit, and send as many bytes as codecs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from wires_by_hand import ByHand, by_hand, made, parameters_of, true_of

from harness import assert_parity, bucket_calls, run_ranks, wrap
from harness.models import DTYPES, EMPTY, FROZEN, MLP, TIED, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import BFloat16, Float8, Int4, Int8, TopK, Wire, ZeroStep
from overlap.hooks.engine.registration import registration_of

STEPS = 3
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
    "both, deferred, automatic": (BOTH | DEFERRED | {"automatic": True}, {}),
    "stochastic": (
        {"reduce_wire": Int4(rounding="stochastic"), "gather_wire": Int8(), "error_feedback": True},
        {},
    ),
    "top-k and float8": ({"reduce_wire": TopK(0.1), "gather_wire": Float8(), "error_feedback": True}, {}),
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
            _by_hand(rank, world_size, DTYPES, ["both, feedback", "gather alone"], options)

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


# Full precision takes 2 (W-1)/W of the parameters in fp32.
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "both": ({"reduce_wire": Int4(), "gather_wire": Int8()}, {}),
    "feedback": ({"reduce_wire": Int4(), "error_feedback": True}, {}),
    "gather, whole": ({"gather_wire": Int4(), "gather": "forward"}, {"partition": "parameter"}),
    "others": ({"reduce_wire": TopK(0.01), "gather_wire": BFloat16(), "deferred": True}, {}),
}
# Of full precision: in the reduction, in the gather.
AT_MOST = {
    "none": (1, 1),
    "both": (0.13, 0.26),
    "feedback": (0.13, 1),
    "gather, whole": (1, 0.13),
    "others": (0.03, 0.51),
}


class Sent:
    """Adds up what an observed stage sends, by operation."""

    def __init__(self) -> None:
        self.bytes: list[tuple[str, int]] = []

    def launched(self, subject: Any, label: str, operation: Any) -> None:
        if operation.sent_bytes:
            self.bytes.append((operation.label, operation.sent_bytes))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 10))


def _bytes(wire: Wire | None, numel: int) -> int:
    return 4 * numel if wire is None else wire.codec(numel).message_bytes if numel else 0


def _counted(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    counts = {}
    for name, (form, options) in COUNTED.items():
        ddp = wrap(_model(), bucket_cap_mb=0.1)
        zero, stage, cuts = made(ddp, form=form, **options)
        registration = registration_of(ddp)
        assert registration is not None
        sent = Sent()
        for step in range(4):
            if step == 3:
                zero.wait()
                registration.observer = sent  # type: ignore[assignment]
            ddp(torch.randn(4, 64)).square().mean().backward()
            zero.step()
            zero.wait()
        registration.observer = None
        reduced = gathered = 0
        named = dict(ddp.module.named_parameters())
        for cut in cuts.passes[-1]:
            shards = [zero.shards[id(named[parameter])] for parameter in cut]
            owned = [sum(end - start for start, end in (s.ranges[r] for s in shards)) for r in range(world_size)]
            longest = [max(owned)] * world_size if zero.partition == "element" else owned
            of_ranks = longest if stage.reduce_wire else owned
            reduced += sum(_bytes(stage.reduce_wire, n) for other, n in enumerate(of_ranks) if other != rank)
            gathered += (world_size - 1) * _bytes(stage.gather_wire, (longest if stage.gather_wire else owned)[rank])
        votes = (stage.error_feedback * len(cuts.passes[-1]) + stage.form.is_deferred) * (
            8 * (world_size - 1) // world_size
        )
        labels = {label for label, _ in sent.bytes}
        assert labels == {"reduce_scatter", "all_gather", *(["all_reduce"] if votes else [])}
        assert sum(nbytes for _, nbytes in sent.bytes) == reduced + gathered + votes, name
        counts[name] = (reduced, gathered)
    return counts


def test_a_rank_sends_what_the_codecs_say() -> None:
    ranks = run_ranks(_counted, 3)
    for name, (in_reduction, in_gather) in AT_MOST.items():
        for part, most in enumerate((in_reduction, in_gather)):
            total = sum(counts[name][part] for counts in ranks)
            full = sum(counts["none"][part] for counts in ranks)
            assert total <= most * full, f"{name}: {total} of {full} bytes"
