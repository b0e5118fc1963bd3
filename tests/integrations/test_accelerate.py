"""Accelerate with a chain, beside Accelerate without."""

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import model_of_two_buckets, prepare_rank, state_of
from features import FRAMEWORKS
from forms import optimizer_of, options_of
from playing import check_row
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_parity, on_ranks, run_ranks
from overlap import AllReduce, ConfigurationError, Join, Step, chain
from overlap.hooks.engine.registration import registration_of

STEPS = 8
SAVED_AFTER = 4


def _data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(4 * batches, 8, generator=generator), torch.randint(4, (4 * batches,), generator=generator)
    )


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    handler = DistributedDataParallelKwargs(bucket_cap_mb=0.005)
    options = {"step_scheduler_with_optimizer": False, **options}
    return Accelerator(cpu=True, kwargs_handlers=[handler], **options)


def _prepared(accelerator: Any, form: str, batches: int = 2 * STEPS, **options: Any) -> Any:
    from overlap.integrations.accelerate import prepare

    model = model_of_two_buckets()
    optimizer = optimizer_of(form, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(_data(batches), batch_size=4)
    if form == "plain":
        return accelerator.prepare(model, optimizer, loader, scheduler)
    return prepare(accelerator, model, optimizer, loader, scheduler, **options_of(form, **options))


def _train(accelerator: Any, prepared: Any, feature: str, *, after: Any = None, skip: int = 0) -> list[torch.Tensor]:
    """The losses of an epoch; ``after(step)`` is called after each step."""
    model, optimizer, loader, scheduler = prepared
    losses = []
    is_accumulating = accelerator.gradient_accumulation_steps > 1
    if skip:
        loader = accelerator.skip_first_batches(loader, skip)
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model) if is_accumulating else contextlib.nullcontext():
            loss = cross_entropy(model(x), y)
            losses.append(loss.detach().clone())
            if "fp16" in feature and step in (2, 3):
                loss = loss * float("inf")
            accelerator.backward(loss)
            if "clip_grad_norm_" in feature:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            if "clip_grad_value_" in feature:
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if after is not None:
            after(step + 1)
    return losses


def _left(prepared: Any, form: str, losses: list[torch.Tensor]) -> dict[str, Any]:
    # Where every step is plain DDP's, nothing else would show that a chain is no longer there.
    assert (registration_of(prepared[0]) is None) == (form == "plain")
    return {**state_of(prepared[0], prepared[1]), "losses": losses}


def _play(feature: str, form: str, folder: str) -> Any:
    if feature in _SPECIAL:
        return _SPECIAL[feature](form, folder)
    options: dict[str, Any] = {}
    if "accumulate" in feature:
        from accelerate.utils import GradientAccumulationPlugin

        options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
            num_steps=3, sync_each_batch="sync" in feature
        )
    if "fp16" in feature:
        options["step_scheduler_with_optimizer"] = True  # Such a schedule waits where an update is skipped.
    accelerator = _accelerator(**options)
    if "fp16" in feature:
        accelerator.scaler = torch.amp.GradScaler("cpu")  # Accelerate makes one on accelerators alone.
    prepared = _prepared(accelerator, form)
    losses = _train(accelerator, prepared, feature)
    return _left(prepared, form, losses)


def _saved(form: str, path: str, **options: Any) -> Any:
    """Trains an epoch, in the midst of which it saves."""
    accelerator = _accelerator()

    def save(step: int) -> None:
        if step == SAVED_AFTER:
            accelerator.save_state(path)

    prepared = _prepared(accelerator, form, **options)
    losses = _train(accelerator, prepared, "", after=save)
    return _left(prepared, form, losses[SAVED_AFTER:])


def _loaded(form: str, path: str, **options: Any) -> Any:
    accelerator = _accelerator()
    prepared = _prepared(accelerator, form, **options)
    with torch.no_grad():
        for parameter in prepared[0].parameters():
            parameter.zero_()
    accelerator.load_state(path)
    losses = _train(accelerator, prepared, "", skip=SAVED_AFTER)
    return _left(prepared, form, losses)


def _resumed(form: str, folder: str) -> Any:
    whole = _saved(form, f"{folder}/{form}", is_resumed=True)
    return _loaded(form, f"{folder}/{form}", is_resumed=True), whole


def _resumed_across(form: str, folder: str, *, is_saved_by_plain: bool) -> Any:
    path = f"{folder}/{form}"
    _saved("plain" if is_saved_by_plain else form, path)
    return _loaded(form if is_saved_by_plain else "plain", path)


def _two_models(form: str, folder: str) -> Any:
    accelerator = _accelerator()
    model, optimizer, loader, scheduler = _prepared(accelerator, form)
    other = torch.nn.Linear(8, 4)
    other, other_optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for x, y in loader:
        for one, its in ((model, optimizer), (other, other_optimizer)):
            loss = cross_entropy(one(x), y)
            losses.append(loss.detach().clone())
            accelerator.backward(loss)
            if one is other:
                accelerator.clip_grad_norm_(other.parameters(), 0.05)
                accelerator.clip_grad_value_(other.parameters(), 0.01)
            its.step()
            its.zero_grad()
        scheduler.step()
    return {**_left((model, optimizer), form, losses), "other": state_of(other, other_optimizer)}


def _another_model(form: str, folder: str) -> Any:
    accelerator = _accelerator()
    prepared = _prepared(accelerator, form)
    _train(accelerator, prepared, "")
    prepared = accelerator.free_memory(*prepared)
    prepared = _prepared(accelerator, form)
    losses = _train(accelerator, prepared, "")
    accelerator.save_state(f"{folder}/{form}")
    losses += _train(accelerator, prepared, "")
    accelerator.load_state(f"{folder}/{form}")
    losses += _train(accelerator, prepared, "")
    return _left(prepared, form, losses)


def _uneven(form: str, folder: str) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    batches = 7  # Of both ranks together.
    uneven = DataLoaderConfiguration(even_batches=False)
    # The default of a scheduler: a step for each process.
    accelerator = _accelerator(step_scheduler_with_optimizer=True, dataloader_config=uneven)
    model, optimizer, loader, scheduler = _prepared(accelerator, form, batches)
    found = _train_joined(model, optimizer, loader, scheduler, accelerator.backward, schedules=1)
    assert len(found["losses"]) == (4, 3)[dist.get_rank()]
    ddp = DistributedDataParallel(model_of_two_buckets(), bucket_cap_mb=0.005)
    optimizer = optimizer_of("plain", ddp.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    if form == "local":
        optimizer = options_of(form)["local_sgd"](ddp, optimizer)
    mine = list(DataLoader(_data(batches), batch_size=4))[dist.get_rank() :: 2]
    joined = _train_joined(
        ddp, optimizer, iter(mine), scheduler, torch.Tensor.backward, schedules=dist.get_world_size()
    )
    return found, {key: value for key, value in joined.items() if key in found}


def _train_joined(
    model: Any, optimizer: Any, loader: Any, scheduler: Any, backward: Any, *, schedules: int
) -> dict[str, Any]:
    losses = []
    with Join([model, optimizer, scheduler]) as join:
        for x, y in join.iterate(loader):
            loss = cross_entropy(model(x), y)
            losses.append(loss.detach().clone())
            backward(loss)
            optimizer.step()
            for _ in range(schedules):
                scheduler.step()
            optimizer.zero_grad()
    return {**state_of(model, optimizer), "losses": losses}


_SPECIAL = {
    "`save_state`, `load_state`": _resumed,
    "`save_state`, `load_state` in plain Accelerate": partial(_resumed_across, is_saved_by_plain=False),
    "`save_state` of plain Accelerate, `load_state`": partial(_resumed_across, is_saved_by_plain=True),
    "two models, one of them with a chain, and `clip_grad_norm_` of the other": _two_models,
    "another model after `free_memory()`": _another_model,
    "`overlap.Join`, with `even_batches=False`": _uneven,
}


def _save_on_one_rank(rank: int, world_size: int, folder: str) -> list[str]:
    prepare_rank(rank, world_size)
    said = []
    for form in ("interleaved", "powersgd"):
        accelerator = _accelerator()
        prepared = _prepared(accelerator, form)
        _train(accelerator, prepared, "")
        if accelerator.is_main_process:
            accelerator.save_state(f"{folder}/{form}")
        _train(accelerator, prepared, "")
        accelerator.wait_for_everyone()
        try:
            accelerator.load_state(f"{folder}/{form}")
            said.append("loaded")
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_a_state_saved_on_one_rank_alone_makes_no_rank_wait_and_is_refused_where_memory_is_lost(tmp_path: Path) -> None:
    first, second = run_ranks(_save_on_one_rank, 2, str(tmp_path))
    assert first == ["loaded", "loaded"]
    assert second[0] == "loaded"
    assert "has overlap-rank-0.pt and lacks overlap-rank-1.pt: every rank saves" in second[1]


def _defer(rank: int, world_size: int) -> list[str]:
    from overlap.integrations.accelerate import prepare

    prepare_rank(rank, world_size)
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("overlap.integrations")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for options in ({}, {"deferred": False}, {"deferred": True}):
        accelerator = _accelerator()
        accelerator.scaler = torch.amp.GradScaler("cpu")
        model = model_of_two_buckets()
        stages = lambda optimizer: chain(AllReduce(), Step(optimizer, **options))  # noqa: B023, E731
        try:
            prepare(accelerator, model, optimizer_of("interleaved", model.parameters()), chain=stages)
            said.append("prepared")
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_a_scaler_defers_an_update_unless_the_chain_rules_that_out() -> None:
    for said in run_ranks(_defer, 2):
        why = "mixed_precision='fp16' decides after backward whether to step"
        assert said[:2] == [f"{why}: the update of the chain is Step(AdamW, deferred)", "prepared"]
        assert said[2].startswith(f"{why}, but Step(AdamW, interleaved) has made the update in backward by then")
        assert said[2].endswith("use Step(optimizer, deferred=True), or 'bf16'")
        assert said[3:] == ["prepared"]


@on_ranks(2)
def test_what_was_prepared_can_be_left_to_accelerate_again(rank: int, world_size: int) -> None:
    from overlap.integrations.accelerate import remove

    prepare_rank(rank, world_size)
    left = []
    for form in ("plain", "interleaved"):
        accelerator = _accelerator()
        prepared = _prepared(accelerator, form)
        losses = _train(accelerator, prepared, "")
        if form != "plain":
            remove(accelerator)
            assert type(prepared[1].optimizer) is torch.optim.AdamW
        losses += _train(accelerator, prepared, "`clip_grad_norm_`")
        left.append({**state_of(prepared[0], prepared[1]), "losses": losses})
    assert_parity(*left, what="with remove()")


@pytest.mark.parametrize("feature", FRAMEWORKS["Accelerate"])
def test_accelerate_with_a_chain_is_what_the_table_says(feature: str, tmp_path: Path) -> None:
    check_row("Accelerate", feature, _play, tmp_path)
