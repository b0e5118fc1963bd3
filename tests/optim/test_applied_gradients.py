"""A gradient that was applied is read-only, and one of which this rank has only a part is not handed out.

Each edit is refused at the line that makes it; reads give plain DDP's values; after step() gradients are ordinary. A
matrix runs in one world of ranks and names the cell that fails.
"""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_loops import SGD, backward, registered, settle

from harness import assert_parity, on_ranks, wrap
from harness.models import MLP
from overlap import TrainingLoopError, allreduce_hook, hook_then_optimizer
from overlap._torch.read_only import GuardedGradient
from overlap.compose import OptimizerHookState


def _register(form: str, ddp: Any) -> Any:
    """The optimizer that the loop steps; ``None`` where it steps none."""
    if form == "hook":
        state = OptimizerHookState(SGD(ddp.parameters()))
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, state))
        return None
    optimizer = registered(form, ddp)
    return None if form == "automatic" else optimizer


READABLE = ("interleaved", "automatic", "hook", "zero behind a reducer")
HIDDEN = ("released", "zero", "zero released", "zero deferred")


def _first(ddp: Any) -> Any:
    return next(iter(ddp.parameters()))


def _out(ddp: Any) -> None:
    torch.add(torch.ones_like(_first(ddp)), 1, out=_first(ddp).grad)


def _assign_data(ddp: Any) -> None:
    _first(ddp).grad.data = torch.zeros_like(_first(ddp))


def _item(ddp: Any) -> None:
    _first(ddp).grad[0] = 1.0


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda ddp: _first(ddp).grad.mul_(2),
    "data": lambda ddp: _first(ddp).grad.data.mul_(2),
    "view": lambda ddp: _first(ddp).grad.view(-1)[:2].fill_(0),
    "an item": _item,
    "out=": _out,
    "data = ...": _assign_data,
    "foreach": lambda ddp: torch._foreach_mul_([p.grad for p in ddp.parameters()], 0.5),
    "clip_grad_norm_": lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01),
    "clip_grad_norm_, one by one": lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01, foreach=False),
    "clip_grad_value_": lambda ddp: torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01),
    "all_reduce": lambda ddp: dist.all_reduce(_first(ddp).grad),
    "memory": lambda ddp: _first(ddp).grad.data_ptr(),
}

READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda ddp: [p.grad.norm() for p in ddp.parameters()],
    "get_total_norm": lambda ddp: torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()]),
    "clone": lambda ddp: [p.grad.clone() for p in ddp.parameters()],
    "detach": lambda ddp: [p.grad.detach() + 0 for p in ddp.parameters()],
    "numpy": lambda ddp: [torch.from_numpy(p.grad.numpy()) for p in ddp.parameters()],
    "tolist": lambda ddp: [torch.tensor(p.grad.tolist()) for p in ddp.parameters()],
    "deepcopy": lambda ddp: [copy.deepcopy(p.grad) for p in ddp.parameters()],
    "save": lambda ddp: _saved([p.grad for p in ddp.parameters()]),
}


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@contextmanager
def _refused(cell: str, pattern: str = "gradient of") -> Iterator[None]:
    said = "nothing was refused"
    try:
        yield
    except TrainingLoopError as error:
        said = str(error)
    assert pattern in said, f"{cell}: {said}"


def _model(**options: Any) -> Any:
    return wrap(MLP.model(), **MLP.ddp_options(), **options)


@on_ranks(2)
def test_every_write_is_refused_where_it_is_made_and_reads_are_plain_ddps(rank: int, world_size: int) -> None:
    for form in (*READABLE, *HIDDEN):
        for view in (True,) if form != "interleaved" else (False, True):
            reference, ddp = (_model(gradient_as_bucket_view=view) for _ in range(2))
            plain, optimizer = SGD(reference.parameters()), _register(form, ddp)
            kept: list[tuple[Any, Any]] = []
            for step in range(4):  # DDP builds its buckets anew after the first.
                plain.zero_grad()
                backward(reference, step, rank)
                if optimizer is None:
                    ddp.zero_grad()
                backward(ddp, step, rank)
                assert all(isinstance(p.grad, GuardedGradient) for p in ddp.parameters())
                for name, write in WRITES.items() if step == 2 else ():
                    with _refused(f"{form}, view={view}, {name}"):
                        write(ddp)
                for name, read in READS.items() if step == 2 else ():
                    cell = f"{form}, view={view}, {name}"
                    if form in HIDDEN:
                        with _refused(cell):
                            read(ddp)
                    else:
                        assert_parity(read(ddp), read(reference), what=cell)
                if form in READABLE:  # Views of a bucket have new values, others are as they were.
                    kept += [(p.grad, q.grad) for p, q in zip(ddp.parameters(), reference.parameters(), strict=True)]
                    for place, (gradient, expected) in enumerate(kept[10:]):
                        what = f"{form}, view={view}, kept gradient {place}"
                        assert_parity(gradient.clone(), expected.clone(), what=what)
                plain.step()
                if optimizer is not None:
                    optimizer.step()
                    settle(optimizer)
                    if form in READABLE:
                        assert_parity(
                            [p.grad for p in ddp.parameters()], [p.grad for p in reference.parameters()], what=form
                        )
                        assert not any(isinstance(p.grad, GuardedGradient) for p in ddp.parameters())
            assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=f"{form}, view={view}")


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "lr": (lambda ddp, o: o.param_groups[0].update(lr=0.05), "'lr' of parameter group 0 was changed from 0.1 to 0.05"),
    "another group": (
        lambda ddp, o: o.param_groups.__setitem__(0, {**o.param_groups[0], "lr": 0.05}),
        "'lr' of parameter group 0 was changed from 0.1 to 0.05",
    ),
    "a parameter": (
        lambda ddp, o: torch._foreach_mul_([p.detach() for p in ddp.parameters()], 0.9),
        "(and 9 other parameters) was changed between backward and",
    ),
    "another gradient": (
        lambda ddp, o: setattr(_first(ddp), "grad", torch.zeros_like(_first(ddp))),
        "the gradient of 0.weight cannot be changed after backward",
    ),
    "None": (
        lambda ddp, o: setattr(_first(ddp), "grad", None),
        "the gradient of 0.weight cannot be changed after backward",
    ),
    "all None": (lambda ddp, o: ddp.zero_grad(), "(and 9 others)"),
    "zeros": (lambda ddp, o: ddp.zero_grad(set_to_none=False), "zero_grad() between backward and"),
}


@on_ranks(2)
def test_what_an_update_in_backward_cannot_see_is_an_error_in_step(rank: int, world_size: int) -> None:
    for form in ("interleaved", "zero in forward"):
        for name, (change, words) in CHANGES.items():
            ddp = _model()
            optimizer = registered(form, ddp)
            for step in range(2):
                optimizer.zero_grad()
                backward(ddp, step, rank)
                if step == 1:
                    settle(optimizer)
                    expected = (
                        words if form == "interleaved" else words.replace(" cannot be changed after backward", "")
                    )
                    with _refused(f"{form}, {name}", expected):
                        change(ddp, optimizer)
                        optimizer.step()
                else:
                    optimizer.step()
    ddp = _model()
    optimizer = registered("interleaved", ddp)
    backward(ddp, 0, rank)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(TrainingLoopError, match="the list of parameters of parameter group 0 was changed"):
        optimizer.step()
