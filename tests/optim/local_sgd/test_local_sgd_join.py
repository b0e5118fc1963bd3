"""Local SGD on uneven inputs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_loops import Values, assign, run, sgd, values_of
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import overlap
from harness import assert_equal_ranks, assert_parity, on_ranks, plain_step, play, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from harness.wires import summed
from overlap import Int4, LocalSGD, TrainingLoopError

BATCHES = (9, 4, 6)
DILOCO: dict[str, Any] = {"outer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)}
WIRED: dict[str, Any] = {"wire": Int4(), "error_feedback": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "overlapped": {"overlap": 1},
    "outer": DILOCO,
    "outer and fragments": {**DILOCO, "fragments": 2, "overlap": 1},
    "outer and fragments, in 4 bits": {**DILOCO, **WIRED, "fragments": 2, "overlap": 1},
    "machine": {"subgroup": "machine"},
}


def _train_unevenly(
    case: Case, rank: int, form: str, start: int, *, period: int = 3, kind: Any = Join, **options: Any
) -> Any:
    ddp = wrap(case.model(), **case.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), period, start, **OPTIONS[form], **options)
    with kind([ddp, made]):
        run(case, rank, range(BATCHES[rank]), ddp, made)
    return ddp, made


def _ends(rank: int, world_size: int, case: Case, form: str) -> None:
    for start in (0, 5) if form in ("alone", "machine") else (0,):
        ddp, made = _train_unevenly(case, rank, form, start)
        what = f"{case}, {form}, from step {start}"
        assert made.averager.step == max(BATCHES[:world_size]) and made.averager.pending is None, what
        assert_equal_ranks(values_of(ddp.module).values(), f"{what}: at the end")
        assert "_sync_final_model" not in vars(ddp)
        run(case, rank, range(2), ddp, made)  # And on it goes, with all ranks.
        made.synchronize()
        assert_equal_ranks(values_of(ddp.module).values(), f"{what}: and on it goes")


ENDS: dict[str, Callable[[int, int], None]] = {
    **{form: functools.partial(_ends, case=MLP, form=form) for form in OPTIONS},
    "unused on some ranks": functools.partial(_ends, case=UNUSED_ON_SOME_RANKS, form="alone"),
    "unused on some ranks, machine": functools.partial(_ends, case=UNUSED_ON_SOME_RANKS, form="machine"),
}


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _by_hand(world_size: int, *, is_wired: bool) -> Values:
    """All ranks' training on each of them; a rank counts for its steps, and its errors of a wire still go out."""
    models = [MLP.model() for _ in range(world_size)]
    optimizers = [sgd(model.parameters()) for model in models]
    shapes = {name: p.shape for name, p in models[0].named_parameters()}
    anchor = _flat(models[0])
    errors = [torch.zeros_like(anchor) for _ in models]
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        steps = [max(0, min(end, BATCHES[other]) - begin) for other in range(world_size)]
        for other, model in enumerate(models):
            for step in range(begin, begin + steps[other]):
                plain_step(model, optimizers[other], MLP.batch(step, other), mean_squared_error)
        changes = []
        for model, own, error in zip(models, steps, errors, strict=True):
            change = _flat(model) - anchor
            changes.append((change / sum(steps) if own == 1 else change * (own / sum(steps))) + error)
        if is_wired:
            total, errors = summed(Int4(), changes)
        else:
            total = sum(changes)  # type: ignore[assignment]
        anchor = anchor + total
        pieces = anchor.split([shape.numel() for shape in shapes.values()])
        means = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        for model in models:
            assign(model, means)
    return values_of(models[0])


def _weights(rank: int, world_size: int) -> None:
    for kind in (Join, overlap.Join):
        ddp, _ = _train_unevenly(MLP, rank, "alone", 0, period=4, kind=kind)
        assert_parity(
            values_of(ddp.module), _by_hand(world_size, is_wired=False), what=kind.__module__, rtol=1e-4,
            atol=1e-6, reason="Gloo adds three and more in another order",
        )  # fmt: skip
        ddp, _ = _train_unevenly(MLP, rank, "alone", 0, period=4, kind=kind, **WIRED)
        assert_parity(values_of(ddp.module), _by_hand(world_size, is_wired=True), what=f"{kind.__module__}, 4 bits")


@on_ranks(3, timeout_s=150)
def test_uneven_inputs(rank: int, world_size: int) -> None:
    play({**ENDS, "a rank counts for the steps that it made in the round": _weights}, rank, world_size)


@on_ranks(2, group_timeout_s=6)
def test_a_join_without_local_sgd_is_refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), 2, 2)
    match = r"Join\(\[ddp, local\]\)" if rank == 1 else "rank 1"
    error: Any = TrainingLoopError if rank == 1 else Exception
    with pytest.raises(error, match=match), Join([ddp]):
        run(MLP, rank, range(2 - rank), ddp, made)
