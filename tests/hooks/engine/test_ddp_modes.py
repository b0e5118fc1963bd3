"""Chains with an update equal plain DDP under DDP's options, compiled, with several models and with uneven inputs."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, TRANSFORMER, UNUSED, Case
from overlap import AllReduce, Cast, CollectiveError, OverlappedOptimizer, Step, chain
from overlap.hooks.engine.wavefront import Completion

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)

MODES: list[tuple[Case, dict[str, Any]]] = [
    (MLP, {"static_graph": True}),
    (UNUSED, {"static_graph": True, "find_unused_parameters": False}),
    (MLP, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    (TRANSFORMER, {"static_graph": True, "gradient_as_bucket_view": True}),
]


def _equals_plain_ddp(rank: int, world_size: int) -> None:
    for case, ddp_options in MODES:
        batches, options = case.batches(rank, steps=6), {**case.ddp_options(), **ddp_options}
        ddp = wrap(case.model(), **options)
        reference = train(ddp, SGD(ddp.parameters()), batches)
        for deferred in (False, True):
            ddp = wrap(case.model(), **options)
            optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
            chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
            candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
            assert_parity(candidate, reference, what=f"{case}, {ddp_options}, {deferred=}")


def test_the_options_of_ddp() -> None:
    run_ranks(_equals_plain_ddp, 2, timeout_s=120)


def _two_models(rank: int, world_size: int) -> None:
    """Two models, one loss and one backward, then an optimizer for each or one for both."""

    def run(overlapped: bool, shared: bool) -> list[Any]:
        first, second = (wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1))
        parameters = [list(first.parameters()), list(second.parameters())]
        optimizers: list[Any] = [SGD([*parameters[0], *parameters[1]])] if shared else [SGD(p) for p in parameters]
        if overlapped:
            optimizers = [OverlappedOptimizer(optimizer) for optimizer in optimizers]
            chain(AllReduce(), Step(optimizers[0])).register(first)
            chain(AllReduce(), Step(optimizers[-1])).register(second)
        states = []
        for step in range(5):
            for optimizer in optimizers if not overlapped else ():
                optimizer.zero_grad()
            batch = MLP.batch(step, rank)
            (first(*batch.inputs) - second(*batch.inputs)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            states.append([p.detach().clone() for group in parameters for p in group])
        return states

    for shared in (False, True):
        assert_parity(run(True, shared), run(False, shared), what=f"two models, {shared=}")


def test_two_models_in_one_process_and_one_backward() -> None:
    run_ranks(_two_models, 2)


def _leaves_nothing(rank: int, world_size: int) -> None:
    threads = threading.active_count()
    for _ in range(3):
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


def test_a_dropped_model_takes_its_chain_its_optimizer_and_its_worker_thread_with_it() -> None:
    run_ranks(_leaves_nothing, 2)


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
