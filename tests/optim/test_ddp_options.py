"""Options of DistributedDataParallel since torch 2.13: every form trains as plain DDP does with the same option."""

import inspect
from typing import Any

import pytest
from step_loops import ADAMW, registered
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks, plain_step, wrap
from harness.models import BATCH_NORM, UNUSED, Case, mean_squared_error
from overlap import AllReduce, chain

OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "batched_grad_copy": (BATCH_NORM, {"batched_grad_copy": True}),
    "bucket_cap_mb_list": (BATCH_NORM, {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.001, 0.002, 0.004]}),
    "forward_sync_buffers": (BATCH_NORM, {"forward_sync_buffers": False}),
    "skip_all_reduce_unused_params": (UNUSED, {"skip_all_reduce_unused_params": True}),
}


FORMS = ("reducer", "interleaved", "deferred", "zero")


def _made(form: str, ddp: DistributedDataParallel) -> Any:
    if form == "reducer":
        chain(AllReduce()).register(ddp)
    return registered(form, ddp, ADAMW) if form in FORMS[1:] else ADAMW(ddp.parameters())


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters, reason="DDP has none of them"
)
@on_ranks(2)
def test_every_form_equals_plain_ddp_in_every_bit_under_each_option(rank: int, world_size: int) -> None:
    for name, (case, options) in OPTIONS.items():
        if name not in inspect.signature(DistributedDataParallel).parameters:
            continue
        records = {}
        for form in ("plain", *FORMS):
            ddp = wrap(case.model(), **{**case.ddp_options(), **options})
            optimizer = _made(form, ddp)
            batches = case.batches(rank, steps=4)
            losses = [plain_step(ddp, optimizer, batch, mean_squared_error).detach() for batch in batches]
            records[form] = losses, list(ddp.parameters()), list(ddp.buffers())
        for form in FORMS:
            assert_parity(records[form], records["plain"], what=f"{name}, {form}")
