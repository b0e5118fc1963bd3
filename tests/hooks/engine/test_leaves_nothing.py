"""What a registration and a failure leave behind when the model is dropped: nothing."""

import functools
import gc
import io
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from harness import on_ranks, wrap
from harness.models import MLP
from overlap import (
    Cast,
    CollectiveError,
    OverlappedOptimizer,
    PowerSGDState,
    Step,
    allreduce_hook,
    chain,
    fp16_compress_hook,
    powerSGD_hook,
)
from overlap.hooks.engine.wavefront import Completion

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


@on_ranks(2)
def test_a_dropped_model_takes_its_chain_its_optimizer_and_its_worker_thread_with_it(rank: int) -> None:
    threads = threading.active_count()
    for _ in range(2):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(Cast(torch.bfloat16), Step(optimizer)).register(ddp)
        for step in range(3):
            ddp(*MLP.batch(step, rank).inputs).sum().backward()
            optimizer.step()
        gone = [weakref.ref(ddp), weakref.ref(optimizer), weakref.ref(next(ddp.parameters()))]
        del ddp, optimizer
        deadline_s = time.monotonic() + 5
        while any(ref() is not None for ref in gone) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # The worker may still be on its way out of the last bucket.
            gc.collect()
        assert [ref() for ref in gone] == [None] * 3
    for thread in threading.enumerate():
        if thread.name.startswith("overlap-"):
            thread.join(timeout=5)
    assert threading.active_count() == threads


@on_ranks(2)
def test_nor_does_a_hook_by_name_keep_a_model_or_a_thread(rank: int, world_size: int) -> None:
    threads = threading.active_count()
    for hook in (allreduce_hook, fp16_compress_hook, powerSGD_hook):
        gone = []
        for _ in range(3):
            state = PowerSGDState(None) if hook is powerSGD_hook else None
            ddp = wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
            ddp.register_comm_hook(state, hook)
            for _ in range(3):
                ddp(torch.ones(2, 512)).sum().backward()
            assert threading.active_count() > threads
            torch.save(list(ddp.parameters()), saved := io.BytesIO())
            saved.seek(0)
            assert torch.equal(torch.load(saved)[0], next(ddp.parameters()))
            gone.append(weakref.ref(next(ddp.parameters())))
            del ddp, state
        deadline_s = time.monotonic() + 5
        while (any(ref() is not None for ref in gone) or threading.active_count() > threads) and (
            time.monotonic() < deadline_s
        ):
            gc.collect()
            time.sleep(0.05)
        assert [ref() for ref in gone] == [None] * 3 and threading.active_count() == threads


class _Model:
    pass


def test_a_failure_that_is_kept_does_not_keep_those_who_have_waited_for_it() -> None:
    completion = Completion(torch.device("cpu"))
    failure = CollectiveError("a connection is broken")
    failure.add_note("raised in part 0")
    completion.fail(failure)
    gone: list[weakref.ref[_Model]] = []

    def train() -> None:
        model = _Model()
        gone.append(weakref.ref(model))
        completion.wait()

    for _ in range(2):
        with pytest.raises(CollectiveError, match="a connection is broken") as raised:
            train()
        raised.value.add_note("raised in step 7")
        assert raised.value.__notes__ == ["raised in part 0", "raised in step 7"]
        del raised
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
