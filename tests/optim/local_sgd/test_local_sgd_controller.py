"""Local SGD from one counter, beside plain loops that average by hand."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, assign, local, mean_of, plain, run, sgd, values_of
from torch import Tensor, nn

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError, OverlappedOptimizer, RegistrationError, Step
from overlap.optim.local_sgd import LocalSGD

START, STEPS, PERIOD = 3, 14, 4


def _average_every(period: int) -> Any:
    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % period == 0:
            assign(model, mean_of(values_of(model)))

    return after_step


def _blocking(rank: int) -> None:
    reference = plain(MLP, rank, steps=STEPS, start_step=START, after_step=_average_every(PERIOD))
    forms: dict[str, Any] = {
        "alone": lambda ddp, o: LocalSGD(ddp, o, PERIOD, START),
        "update in backward": lambda ddp, o: LocalSGD(
            ddp, wrapped := OverlappedOptimizer(o), PERIOD, START, update=Step(wrapped)
        ),
        "deferred update": lambda ddp, o: LocalSGD(
            ddp, wrapped := OverlappedOptimizer(o), PERIOD, START, update=Step(wrapped, deferred=True)
        ),
        "a schedule": lambda ddp, o: LocalSGD(ddp, o, lambda step: PERIOD, START),
    }
    for form, build in forms.items():
        candidate, made, ddp = local(MLP, rank, steps=STEPS, build=build, zero_grad="backward" not in form)
        assert_parity(candidate, reference, what=form)
        assert made.step_count == STEPS and made.synchronizer.rounds == (STEPS - START) // PERIOD
        assert ddp.require_backward_grad_sync == (form in ("update in backward", "deferred update"))
        made.synchronize()
        assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what=f"{form}, synchronized")
        made.remove()
        assert ddp.require_backward_grad_sync
        with pytest.raises(RegistrationError, match="make another one"):
            made.step()

    lengths = {3: 2, 5: 5, 10: 1, 11: 3}
    ends = (2, 7, 8, 11)

    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count in ends:
            assign(model, mean_of(values_of(model)))

    expected = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    candidate, _, _ = local(MLP, rank, steps=STEPS, build=lambda ddp, o: LocalSGD(ddp, o, lengths.__getitem__, START))
    assert_parity(candidate, expected, what="a schedule of periods")


def _warm_up(rank: int) -> None:
    """Before start_step, and with period 1, it is plain DDP."""
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    optimizer = sgd(ddp.parameters())
    reference = []
    for step in range(6):
        optimizer.zero_grad()
        mean_squared_error(ddp, BATCH_NORM.batch(step, rank)).backward()
        optimizer.step()
        reference.append(values_of(ddp.module))
    candidate, made, _ = local(BATCH_NORM, rank, steps=6, build=lambda ddp, o: LocalSGD(ddp, o, 2, 6))
    assert_parity(candidate, reference, what="before start_step")
    assert_parity(made.state_dict()["state"], optimizer.state_dict()["state"], what="optimizer state before start_step")

    def double() -> nn.Module:
        return MLP.model().double()

    def train(ddp: Any, holder: Any) -> list[Values]:
        records = []
        for step in range(30):
            holder.zero_grad()
            batch = MLP.batch(step, rank)
            nn.functional.mse_loss(ddp(batch.inputs[0].double()), batch.target.double()).backward()
            holder.step()
            records.append(values_of(ddp.module))
        return records

    ddp, other = wrap(double()), wrap(double())
    assert_parity(
        train(ddp, LocalSGD(ddp, sgd(ddp.parameters()), 1, 0)),
        train(other, sgd(other.parameters())),
        what="period 1 is plain DDP with a momentum, which is linear",
        exact=False,
        rtol=1e-9,
        atol=1e-12,
        reason="updates are averaged instead of gradients: rounded in another order, in float64",
    )


def _overlapped(rank: int) -> None:
    for delay in (1, 3):
        pending: dict[int, tuple[Values, Values]] = {}

        def after_step(
            model: nn.Module, optimizer: Any, count: int, delay: int = delay, pending: Any = pending
        ) -> None:
            if count in pending:
                snapshot, mean = pending.pop(count)
                current = values_of(model)
                assign(model, {n: (current[n] - snapshot[n]) + mean[n] for n in current})
            if count % PERIOD == 0:
                snapshot = values_of(model)
                pending[count + delay] = (snapshot, mean_of(snapshot))

        reference = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
        for form in ("alone", "update in backward"):

            def build(ddp: Any, o: Any, form: str = form, delay: int = delay) -> LocalSGD:
                if form == "alone":
                    return LocalSGD(ddp, o, PERIOD, START, overlap=delay)
                wrapped = OverlappedOptimizer(o)
                return LocalSGD(ddp, wrapped, PERIOD, START, overlap=delay, update=Step(wrapped))

            candidate, made, ddp = local(MLP, rank, steps=STEPS, build=build, zero_grad=form == "alone")
            assert_parity(candidate, reference, what=f"{form}, overlap {delay}")
            made.synchronize()
            assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="synchronized")

    # Where nothing is learnt meanwhile, it is the blocking form: the rate is 0 in the step that the average rides in.
    def frozen(overlap: bool) -> list[Values]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), PERIOD, 0, overlap=overlap)
        records = []
        for step in range(2 * PERIOD + 1):
            made.param_groups[0]["lr"] = 0.0 if step and step % PERIOD == 0 else 0.1
            records += run(MLP, rank, [step], ddp, made)
        return records

    blocking, overlapped = frozen(False), frozen(True)
    assert_parity(overlapped[PERIOD], blocking[PERIOD], what="overlapped with a step that learns nothing")
    assert_parity(overlapped[-1], blocking[-1], what="overlapped, a round later")


OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def _outer(rank: int) -> None:
    class Reference:
        """DiLoCo as the paper has it, with the fragments of the streaming form."""

        def __init__(self, fragments: list[list[str]]) -> None:
            start = {name: p.detach().clone() for name, p in MLP.model().named_parameters()}
            self.global_values, self.momentum = start, {name: torch.zeros_like(p) for name, p in start.items()}
            self.is_first = dict.fromkeys(start, True)
            self.fragments, self.round = fragments, 0

        def after_step(self, model: nn.Module, optimizer: Any, count: int) -> None:
            if count % PERIOD:
                return
            names = self.fragments[self.round % len(self.fragments)]
            self.round += 1
            means = mean_of({name: value for name, value in values_of(model).items() if name in names})
            for name in names:
                gradient = self.global_values[name] - means[name]
                first, self.is_first[name] = self.is_first[name], False
                self.momentum[name] = gradient.clone() if first else 0.9 * self.momentum[name] + gradient
                self.global_values[name] = self.global_values[name] - 0.7 * (gradient + 0.9 * self.momentum[name])
            assign(model, {name: self.global_values[name] for name in names})

    names = [name for name, _ in MLP.model().named_parameters()]
    reason = "the update is one expression here, and kernels elsewhere"
    for fragments in (1, 3):
        make = functools.partial(LocalSGD, period=PERIOD, start_step=0, outer=OUTER, fragments=fragments)
        candidate, made, _ = local(MLP, rank, steps=16, build=make)
        assert (
            sorted(name for part in made.synchronizer.tensors.fragments for name in part) == sorted(names)
            and len(made.synchronizer.tensors.fragments) == fragments
        )
        reference = plain(
            MLP, rank, steps=16, start_step=0, after_step=Reference(made.synchronizer.tensors.fragments).after_step
        )
        assert_parity(
            candidate,
            reference,
            what=f"DiLoCo, {fragments} fragments",
            exact=False,
            rtol=1e-4,
            atol=1e-6,
            reason=reason,
        )
    # Right after an average there is nothing to learn, and a momentum must not move the model.
    _, made, ddp = local(
        MLP, rank, steps=PERIOD, build=functools.partial(LocalSGD, period=PERIOD, start_step=0, outer=OUTER)
    )
    averaged_values = values_of(ddp.module)
    made.synchronize()
    assert_parity(values_of(ddp.module), averaged_values, what="synchronized after an average")
    # A plain optimizer's state: the next round begins at the model as it is now, not as it was.
    run(MLP, rank, [PERIOD], ddp, made)
    with pytest.warns(UserWarning, match="starts again from step 0"):
        made.load_state_dict(made.optim.state_dict())
    ddp.module.load_state_dict(MLP.model(seed=9).state_dict())
    made.param_groups[0]["lr"] = 0.0
    run(MLP, rank, range(PERIOD), ddp, made)
    assert_parity(values_of(ddp.module), values_of(MLP.model(seed=9)), what="restarted, and nothing learnt")
    # An outer rate of 1 without momentum is the plain average, overlapped or not, and after a warm-up.
    for overlap in (False, True):
        build = functools.partial(LocalSGD, period=PERIOD, start_step=START, overlap=overlap)
        averaged, _, _ = local(MLP, rank, steps=STEPS, build=build)
        build = functools.partial(build, outer=functools.partial(torch.optim.SGD, lr=1.0))
        stepped, _, _ = local(MLP, rank, steps=STEPS, build=build)
        assert_parity(
            stepped, averaged, what="outer SGD of rate 1", exact=False, rtol=1e-4, atol=1e-6,
            reason="x - (x - mean) is rounded",
        )  # fmt: skip


def _options(rank: int) -> None:
    def average_all(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD:
            return
        assign(model, mean_of(values_of(model)))
        for state in optimizer.state.values():
            state["momentum_buffer"].copy_(mean_of({"": state["momentum_buffer"]})[""])

    def reset(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD == 0:
            assign(model, mean_of(values_of(model)))
            optimizer.state.clear()

    for option, after_step in (("average", average_all), ("reset", reset)):
        reference = plain(BATCH_NORM, rank, steps=10, start_step=0, after_step=after_step)
        build = functools.partial(LocalSGD, period=PERIOD, start_step=0, optimizer_state=option)
        candidate, _, _ = local(BATCH_NORM, rank, steps=10, build=build)
        assert_parity(candidate, reference, what=f"BatchNorm, optimizer state: {option}")

    # Half precision, averaged in fp32, and by an outer optimizer that keeps fp32.
    model = nn.Linear(3, 3, bias=False).bfloat16()
    for outer in (None, functools.partial(torch.optim.SGD, lr=1.0)):
        ddp = wrap(model)
        made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=1.0), 1, 0, average_dtype=torch.float32, outer=outer)
        storage = ddp.module.weight.data_ptr()
        made.zero_grad()
        (ddp(torch.full((1, 3), 0.01 + rank, dtype=torch.bfloat16)).sum()).backward()
        own = (model.weight.detach() - ddp.module.weight.grad).float()
        made.step()
        mean = mean_of({"": own})[""].bfloat16()
        assert_parity(ddp.module.weight.detach(), mean, what=f"bfloat16, {outer=}")
        assert ddp.module.weight.data_ptr() == storage


def _checkpoint(rank: int) -> None:
    """In the middle of a round, with an average in flight or without: as if nothing had happened."""
    for stop in (2, 9, 11):
        build = functools.partial(LocalSGD, period=3, start_step=START, overlap=2, outer=OUTER, fragments=2)
        whole, _, _ = local(BATCH_NORM, rank, steps=16, build=build)
        _, made, ddp = local(BATCH_NORM, rank, steps=stop, build=build)
        assert (made.synchronizer.pending is not None) == (stop == 9)
        buffer = io.BytesIO()
        torch.save({"model": ddp.module.state_dict(), "optimizer": made.state_dict()}, buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)

        fresh = wrap(BATCH_NORM.model(seed=5), **BATCH_NORM.ddp_options())
        optimizer = sgd(fresh.parameters())
        resumed = build(fresh, optimizer)
        fresh.module.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        assert resumed.param_groups is optimizer.param_groups and resumed.step_count == stop
        rest = run(BATCH_NORM, rank, range(stop, 16), fresh, resumed)
        assert_parity(rest, whole[stop:], what=f"resumed after step {stop}")
        sgd(fresh.parameters()).load_state_dict(saved["optimizer"])  # A plain optimizer loads it, too.
        with pytest.raises(ConfigurationError, match="another number of fragments"):
            LocalSGD(other := wrap(BATCH_NORM.model()), sgd(other.parameters()), 3).load_state_dict(saved["optimizer"])
        with pytest.warns(UserWarning, match="starts again from step 0"):
            resumed.load_state_dict(optimizer.state_dict())
        assert resumed.step_count == 0


def _as_an_optimizer(rank: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    inner = sgd(ddp.parameters())
    made = LocalSGD(ddp, inner, period=2, start_step=0)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    storage = [p.data_ptr() for p in ddp.parameters()]
    calls: list[int] = []
    made.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> Tensor:
        made.zero_grad()
        loss = mean_squared_error(ddp, MLP.batch(0, rank))
        loss.backward()
        return loss

    assert made.step(closure).item() > 0
    schedule.step()
    with ddp.no_sync():  # Accumulates as ever.
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    mean_squared_error(ddp, MLP.batch(2, rank)).backward()
    made.step()
    assert calls == [1, 1] and inner.param_groups[0]["lr"] == 0.05 and made.defaults is inner.defaults
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="averaged")
    assert [p.data_ptr() for p in ddp.parameters()] == storage
    with pytest.raises(ConfigurationError, match="save its state_dict"):
        copy.deepcopy(made)


def _errors(rank: int) -> None:
    others = dist.new_group([0]), dist.new_group([1])
    ddp = wrap(MLP.model())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"period": 0}, "period must be a whole number of at least 1, got 0"),
        ({"period": 2.0}, "got 2.0"),
        ({"period": {}}, "is empty"),
        ({"period": {2: 2, 1: 2}}, "periods of period must ascend"),
        ({"period": {2: 1, 4: 2}, "outer": OUTER}, "need one period"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, got -1"),
        ({"subgroup": others[1 - rank]}, f"rank {rank} is not in the subgroup"),
        ({"subgroup": "node"}, "machine"),
        ({"overlap": -1}, "overlap must be a whole number"),
        ({"fragments": 100}, "leaves some without a parameter"),
        ({"optimizer_state": "drop"}, "keep, average, reset"),
        ({"optimizer_state": "average", "overlap": True}, "overlap=True is there to avoid"),
        ({"average_dtype": torch.int32}, "floating-point dtype"),
        ({"outer": torch.optim.SGD([torch.ones(1)])}, "functools.partial"),
        ({"outer": functools.partial(torch.optim.SGD, lr=-1.0)}, "outer could not be made"),
        ({"update": torch.nn.Linear(1, 1)}, "a stage that updates"),
        ({"update": Step(sgd(ddp.parameters()))}, "given the same OverlappedOptimizer"),
        ({"optimizer": sgd(nn.Linear(1, 1).parameters())}, "no parameter of this model"),
        ({"optimizer": torch.optim.SGD}, "the class SGD"),
        ({"ddp": ddp.module}, "takes a DistributedDataParallel"),
    ]
    for options, match in cases:
        with pytest.raises(ConfigurationError, match=match):
            LocalSGD(**{"ddp": ddp, "optimizer": sgd(ddp.parameters()), **options})
    made = LocalSGD(ddp, sgd(ddp.parameters()), lambda step: 0, 0)
    with pytest.raises(ConfigurationError, match="period at step 0 must be a whole number of at least 1, got 0"):
        run(MLP, rank, [0], ddp, made)
    made.remove()
    # Momentum on one rank alone.
    made = LocalSGD(ddp, sgd(ddp.parameters()), 1, 0, optimizer_state="average")
    made.zero_grad()
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    if rank == 1:
        made.zero_grad()
    with pytest.raises(ConfigurationError, match="same state on every rank"):
        made.step()


def _everything(rank: int, world_size: int) -> None:
    for part in (_blocking, _warm_up, _overlapped, _outer, _options, _checkpoint, _as_an_optimizer, _errors):
        part(rank)


def test_on_two_ranks() -> None:
    run_ranks(_everything, 2, timeout_s=110)
