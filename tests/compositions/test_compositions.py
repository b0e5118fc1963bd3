"""Every sentence in every situation: what is exact stays exact, ranks stay equal, and a run resumes bit for bit."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_equal_ranks, assert_parity, on_ranks, run_ranks
from overlap import Join, LocalSGD, ZeroRedundancyOptimizer
from overlap.hooks.engine.registration import registration_of

from .sentences import SENTENCES, Net, Sentence

STEPS = 6


def _made(sentence: Sentence, seed: int = 0, **options: Any) -> tuple[DistributedDataParallel, list[Any]]:
    ddp = _wrapped(seed, **options)
    return ddp, sentence.build(ddp)


def _wrapped(seed: int = 0, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(Net(), bucket_cap_mb=1024 / 2**20, **options)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 32, (4, 6), generator=generator), torch.randn(4, 16, generator=generator)


def _loss(ddp: Any, step: int, rank: int) -> Tensor:
    tokens, target = _batch(step, rank)
    loss: Tensor = torch.nn.functional.mse_loss(ddp(tokens), target)
    return loss


def _step(ddp: Any, optimizers: list[Any], step: int, rank: int) -> None:
    _loss(ddp, step, rank).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _settle(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, "wait"):
            optimizer.wait()


# Situations: each plays one sentence on one rank and raises if it does not hold.


def _trains(name: str, sentence: Sentence, rank: int) -> None:
    ddp, optimizers = _made(sentence)
    plain = _wrapped()
    by_hand = sentence.plain(plain)
    before = copy.deepcopy(list(ddp.parameters()))
    for step in range(4):
        _step(ddp, optimizers, step, rank)
        _settle(optimizers)
        if step % sentence.equal_every == sentence.equal_every - 1:
            assert_equal_ranks(ddp.parameters(), f"{name}, step {step}")
        if sentence.by_hand is not None:
            _loss(plain, step, rank).backward()
            sentence.by_hand(plain, by_hand)
            for optimizer in by_hand:
                optimizer.step()
                optimizer.zero_grad()
            trained = list(ddp.parameters()), list(plain.parameters())
            assert_parity(*trained, what=f"{name}, step {step}", **sentence.tolerance)
    assert all(parameter.isfinite().all() for parameter in ddp.parameters()), name
    assert not any(torch.equal(*pair) for pair in zip(before, ddp.parameters(), strict=True)), name


def _accumulates(name: str, sentence: Sentence, rank: int) -> None:
    ddp, optimizers = _made(sentence)
    for step in range(4):
        with ddp.no_sync():
            _loss(ddp, 100 + step, rank).backward()
        _step(ddp, optimizers, step, rank)
    _settle(optimizers)
    assert_equal_ranks(ddp.parameters(), f"{name}, accumulated")


def _joins(name: str, sentence: Sentence, rank: int) -> None:
    ddp, optimizers = _made(sentence)
    with Join([ddp, *optimizers]):
        for step in range(2 + 2 * rank):
            _step(ddp, optimizers, step, rank)
    _settle(optimizers)
    assert_equal_ranks(ddp.parameters(), f"{name}, after uneven inputs")


def _meets_nan(name: str, sentence: Sentence, rank: int) -> None:
    """A gradient that is not finite on one rank: seen by all, or skipped by all; and it is not remembered."""
    ddp, optimizers = _made(sentence)
    for step in range(2):
        _step(ddp, optimizers, step, rank)
    _settle(optimizers)
    before = copy.deepcopy(list(ddp.parameters()))
    loss = _loss(ddp, 2, rank) * (float("nan") if rank == 0 else 1.0)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    _settle(optimizers)
    if sentence.skips:
        assert_parity(list(ddp.parameters()), before, what=f"{name}, a step that is skipped")
    elif sentence.equal_every == 1:
        _assert_same_finite(ddp, name)
    with torch.no_grad():
        for parameter, was in zip(ddp.parameters(), before, strict=True):
            parameter.copy_(was)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.nan_to_num_()
    _step(ddp, optimizers, 3, rank)


def _assert_same_finite(ddp: Any, name: str) -> None:
    finite = torch.stack([parameter.isfinite().all() for parameter in ddp.parameters()]).int()
    here = finite.clone()
    dist.all_reduce(here, op=dist.ReduceOp.MIN)
    assert torch.equal(here, finite), f"{name}: ranks differ in what is finite"


def _fails(name: str, sentence: Sentence, rank: int) -> None:
    """An error of the model's own in one rank's backward is an error on both, at once."""
    if sentence.equal_every > 1:
        return  # Each rank trains alone then.
    ddp, optimizers = _made(sentence)
    for step in range(2):  # DDP cuts its buckets after the first, and the error is to come when some have been sent.
        _step(ddp, optimizers, step, rank)
    handle = ddp.module.embedding.weight.register_hook(_broken if rank == 0 else _intact)
    try:
        _loss(ddp, 2, rank).backward()
    except Exception:
        pass
    else:
        raise AssertionError(f"{name}: an error on one rank was not seen on rank {rank}")
    handle.remove()


def _broken(gradient: Tensor) -> Tensor:
    raise ValueError("broken on purpose")


def _intact(gradient: Tensor) -> Tensor:
    return gradient


def _is_removed(name: str, sentence: Sentence, rank: int) -> None:
    """After remove() the model is plain DDP's again, and takes the same chain a second time."""
    ddp, optimizers = _made(sentence)
    _step(ddp, optimizers, 0, rank)
    _settle(optimizers)
    registration = registration_of(ddp)
    assert registration is not None
    registration.remove()
    ddp.zero_grad()
    _loss(ddp, 1, rank).backward()
    ddp.zero_grad()
    fresh = sentence.build(ddp)
    _step(ddp, fresh, 2, rank)
    _settle(fresh)
    if sentence.equal_every == 1:
        assert_equal_ranks(ddp.parameters(), f"{name}, registered again")


SITUATIONS: dict[str, Callable[[str, Sentence, int], None]] = {
    "trains": _trains,
    "accumulates": _accumulates,
    "joins": _joins,
    "meets a NaN": _meets_nan,
    "fails": _fails,
    "is removed": _is_removed,
}


@pytest.mark.parametrize("situation", SITUATIONS)
@on_ranks(2, timeout_s=240)
def test_every_composition(rank: int, world_size: int, situation: str) -> None:
    failures = []
    for name, sentence in SENTENCES.items():
        try:
            SITUATIONS[situation](name, sentence, rank)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
    assert not failures, "\n".join(failures)


def _states(ddp: Any, optimizers: list[Any]) -> Any:
    return overlap.state_dict(ddp, optimizers if len(optimizers) > 1 else optimizers[0])


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.pt".replace(" ", "_")


def _folder(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_")


# Rounded by bucket. DDP cuts its buckets anew after its first pass, so the first one after a resume is rounded in other
# places: as in a run whose DistributedDataParallel is built anew at the same step, and keeps its stages and optimizers.
ROUNDED_BY_BUCKET = (
    "fp8, skip",
    "routed to factors, then sharded",
    "sparse, deferred",
    "4 bits, sharded, skip",
    "factors in 8 bits, clipped, two sharded updates",
    "4 bits, clipped, sharded, in the next forward",
    "factors in 8 bits, two updates",
)
# DDP keeps the buckets that it begins with.
_KEPT_BUCKETS = {"find_unused_parameters": True}


def _wrapped_anew(ddp: DistributedDataParallel) -> DistributedDataParallel:
    registration = registration_of(ddp)
    assert registration is not None
    stage = registration.stage
    registration.remove()
    anew = DistributedDataParallel(ddp.module, bucket_cap_mb=1024 / 2**20)
    overlap.register(anew, stage)
    return anew


def _uninterrupted(rank: int, world_size: int, folder: Path, names: list[str], options: dict[str, Any]) -> None:
    for name in names:
        ddp, optimizers = _made(SENTENCES[name], **options)
        for step in range(STEPS):
            if step == 4:
                # Written while the next steps are made.
                written = overlap.save(_folder(folder, name), ddp, optimizers, wait=False, step=step)
                if name in ROUNDED_BY_BUCKET and not options:
                    ddp = _wrapped_anew(ddp)
            _step(ddp, optimizers, step, rank)
        torch.save(_states(ddp, optimizers), _file(folder, f"{name}-end", rank))
        written.result()


def _resumed(rank: int, world_size: int, folder: Path, names: list[str], options: dict[str, Any]) -> None:
    failures = []
    for name in names:
        ddp, optimizers = _made(SENTENCES[name], seed=7, **options)
        try:
            assert overlap.load(_folder(folder, name), ddp, optimizers) == {"step": 4}
            for step in range(4, STEPS):
                _step(ddp, optimizers, step, rank)
            end = torch.load(_file(folder, f"{name}-end", rank), weights_only=True)
            assert_parity(_states(ddp, optimizers), end, what=name)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("options", [{}, _KEPT_BUCKETS], ids=["as DDP is", "kept buckets"])
def test_every_composition_resumes_bit_for_bit_in_new_processes(tmp_path: Path, options: dict[str, Any]) -> None:
    names = list(ROUNDED_BY_BUCKET if options else SENTENCES)
    run_ranks(_uninterrupted, 2, tmp_path, names, options, timeout_s=240)
    run_ranks(_resumed, 2, tmp_path, names, options, timeout_s=240)


# Another number of ranks, as docs/resuming.md has it: four, then one.


def _on_four(rank: int, world_size: int, folder: Path) -> None:
    os.fsync = lambda descriptor: None
    for name, sentence in SENTENCES.items():
        ddp, optimizers = _made(sentence)
        for step in range(3):
            _step(ddp, optimizers, step, rank)
        _settle(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, LocalSGD):
                optimizer.synchronize()
        overlap.save(_folder(folder, name), ddp, optimizers, step=3)
        torch.save((_states(ddp, optimizers), _wholes(optimizers)), _file(folder, name, rank))


def _on_one(rank: int, world_size: int, folder: Path) -> None:
    failures = []
    for name, sentence in SENTENCES.items():
        ddp, optimizers = _made(sentence, seed=7)
        files = [torch.load(_file(folder, name, old), weights_only=True) for old in range(4)]
        try:
            assert overlap.load(_folder(folder, name), ddp, optimizers) == {"step": 3}
            found, olds = _states(ddp, optimizers), [state for state, _ in files]
            assert_parity(found["model"], olds[0]["model"], what=f"{name}, the model")
            now = [_by_table([found[part]]) for part in ("stages", "optimizer")]
            then = [_by_table([old[part] for old in olds]) for part in ("stages", "optimizer")]
            assert_parity([_wholes(optimizers), now], [files[0][1], then], what=f"{name}, optimizers and stages")
            _step(ddp, optimizers, 3, rank)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


def _wholes(optimizers: list[Any]) -> list[Any]:
    sharded = [one for one in optimizers if isinstance(one, ZeroRedundancyOptimizer)]
    for zero in sharded:
        zero.consolidate_state_dict(to=None)
    return [copy.deepcopy(zero.state_dict()) for zero in sharded]


def _by_table(states: list[Any], key: Any = "") -> Any:
    """What one rank has of the ``states`` of all: the sum of their errors, the mean of their residuals, and what is the
    same on all ranks."""
    if isinstance(states[0], list):
        return [_by_table([state[place] for state in states]) for place in range(len(states[0]))]
    if not isinstance(states[0], dict):
        return states[0]
    if key in ("error", "residuals"):
        divisor = 1 if key == "error" else len(states)
        return {name: sum(state[name] for state in states) / divisor for name in states[0]}
    own = {"rank", "ranks", "generator"}
    if "places" in states[0]:  # Sharded: compared when it is put together.
        own |= {"places", "state"}
    return {key: _by_table([state[key] for state in states], key) for key in states[0] if key not in own}


def test_every_composition_resumes_on_one_rank_what_four_have_saved(tmp_path: Path) -> None:
    run_ranks(_on_four, 4, tmp_path, timeout_s=240)
    run_ranks(_on_one, 1, tmp_path, timeout_s=240)
