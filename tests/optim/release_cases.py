"""Forms of update that release gradients, each beside the same without."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness import wrap
from harness.models import MLP, Case
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.stage import walk
from overlap.optim.release import GradientRelease
from overlap.optim.update import Update

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

FORMS = ("interleaved", "automatic", "zero", "zero in forward", "zero by parameter", "zero automatic")
STEPPED = tuple(form for form in FORMS if "automatic" not in form)
Make = Callable[[Any], torch.optim.Optimizer]


def release_of(ddp: Any) -> GradientRelease:
    """What gives back the memory of a registered model's gradients."""
    registration = registration_of(ddp)
    assert registration is not None
    found = [stage.release for stage in walk(registration.stage) if isinstance(stage, Update)]
    release = next(one for one in found if one is not None)
    assert all(one in (release, None) for one in found), "one for all updates of a model"
    return release


def storages(ddp: Any) -> list[torch.UntypedStorage]:
    """Those of DDP's buckets, as far as they have been seen."""
    return [memory._storage for memory in release_of(ddp)._memories.values()]


def held_bytes(ddp: Any) -> int:
    """The memory of DDP's buckets."""
    return sum(storage.nbytes() for storage in storages(ddp))


def is_released(ddp: Any) -> bool:
    """Whether DDP's buckets have no memory, once the backend drops the tensors of collectives that are done."""
    release, deadline_s = release_of(ddp), time.monotonic() + 5
    while held_bytes(ddp) and time.monotonic() < deadline_s:
        time.sleep(0.001)
        with release._lock:
            release._empty_done()  # As the next forward does.
    return held_bytes(ddp) == 0


def wrapped(case: Case = MLP, **options: Any) -> Any:
    return wrap(case.model(), **{**case.ddp_options(), "gradient_as_bucket_view": True, **options})


def registered(form: str, ddp: Any, make: Make = SGD, **options: Any) -> Any:
    """What the loop holds, with an update in that form registered; ``options`` are the stage's."""
    if form.startswith("zero"):
        arguments = make.keywords  # type: ignore[attr-defined]
        partition = "parameter" if "parameter" in form else "element"
        zero = ZeroRedundancyOptimizer(ddp.parameters(), make.func, partition=partition, **arguments)  # type: ignore[attr-defined]
        gather = "forward" if "forward" in form else "backward"
        chain(ZeroStep(zero, gather=gather, automatic="automatic" in form, **options)).register(ddp)
        return zero
    plain = make(ddp.parameters())
    optimizer = plain if "automatic" in form else OverlappedOptimizer(plain)
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer


def settle(optimizer: Any) -> None:
    if hasattr(optimizer, "wait"):
        optimizer.wait()


def gradients(ddp: Any) -> Iterator[torch.Tensor]:
    """Those that have values; a gradient that was released is a stand-in without."""
    return (p.grad for p in ddp.parameters() if has_gradient(p))


def has_gradient(parameter: Any) -> bool:
    return getattr(parameter.grad, "plain", parameter.grad) is not None
