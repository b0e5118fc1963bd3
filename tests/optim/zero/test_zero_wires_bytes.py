"""What wires send in a sharded update: as many bytes as their codecs say, and what is left of the accuracy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from wires_by_hand import made

from harness import run_ranks, wrap
from overlap import BFloat16, CollectiveError, Int4, Int8, TopK, Wire
from overlap.hooks.engine.registration import registration_of

# Full precision takes 2 (W-1)/W of the parameters in fp32.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    for name, (form, options) in FORMS.items():
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
            each = [max(owned)] * world_size if stage.gather_wire and zero.partition == "element" else owned
            reduced += sum(_bytes(stage.reduce_wire, n) for other, n in enumerate(owned) if other != rank)
            gathered += (world_size - 1) * _bytes(stage.gather_wire, each[rank])
        votes = (stage.error_feedback * len(cuts.passes[-1]) + stage.form.is_deferred) * (
            8 * (world_size - 1) // world_size
        )
        labels = {label for label, _ in sent.bytes}
        assert labels == {"reduce_scatter", "all_gather", *(["all_reduce"] if votes else [])}
        assert sum(nbytes for _, nbytes in sent.bytes) == reduced + gathered + votes, name
        counts[name] = (reduced, gathered)
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_sends_what_the_codecs_say(world_size: int) -> None:
    ranks = run_ranks(_counted, world_size)
    for name, (in_reduction, in_gather) in AT_MOST.items():
        for part, most in enumerate((in_reduction, in_gather)):
            total = sum(counts[name][part] for counts in ranks)
            full = sum(counts["none"][part] for counts in ranks)
            assert total <= most * full, f"{name}: {total} of {full} bytes"


def _plan(rank: int, world_size: int) -> str:
    _zero, stage, _cuts = made(wrap(_model()), form={"reduce_wire": Int4(chunk=64), "gather_wire": Int8()})
    wire = Int4() if rank == 0 else Int8()
    with pytest.raises(CollectiveError, match=r"reduce_wire=Int8\(\).*rank 0 registers.*reduce_wire=Int4\(\)"):
        made(wrap(_model()), form={"reduce_wire": wire})
    return stage.signature


def test_ranks_compare_their_wires() -> None:
    first, second = run_ranks(_plan, 2)
    assert first == second and "reduce_wire=Int4(chunk=64), gather_wire=Int8()" in first
