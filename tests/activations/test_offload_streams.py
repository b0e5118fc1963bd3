"""Offloading on simulated streams: no race and no use after free, and every wait and every hold is needed for that."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity, run_ranks
from harness.streams import STREAMS_BACKEND, detecting
from overlap import AllReduce, Join, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.device import current_stream, new_stream, on_stream
from overlap.activations import checkpoint_wrapper, limit_offload_in_flight, offload_wrapper, store
from overlap.activations.store import Store
from overlap.activations.transfers import Transfer, Transfers

DEVICE = torch.device("cpu")
WIDTH, ROWS = 16, 8
NBYTES = WIDTH * ROWS * 4


class Gaps(nn.Module):
    """Saves tensors with gaps, conjugated and negated ones."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.view_as_complex(x.view(ROWS, -1, 2))
        product = number.conj() * number[:, :1] * number.conj().imag
        return torch.view_as_real(product).view(ROWS, WIDTH) + x.t()[::2].exp().sum()


def _model(*, layers: int = 4, wrap: Callable[[nn.Module], nn.Module] = offload_wrapper) -> nn.Module:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH, device=DEVICE), nn.Tanh()) for _ in range(layers)]
    return wrap(nn.Sequential(*parts[:-1], Gaps(), parts[-1]))


def _input() -> Tensor:
    return torch.randn(ROWS, WIDTH, device=DEVICE)


def _all(module: nn.Module) -> nn.Module:
    return offload_wrapper(module, min_bytes=0)


def trains(wrap: Callable[[nn.Module], nn.Module] = _all) -> None:
    model = _model(wrap=wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(_input()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluates() -> None:
    """Forward after forward, whose graphs nobody runs backward through."""
    model = _model(wrap=_all)
    for _ in range(3):
        model(_input()).sum()


def stops_halfway() -> None:
    """Backward reaches the last layers alone; what was fetched ahead for the others is dropped."""
    model: Any = _model(wrap=_all)
    for _ in range(3):
        torch.autograd.grad(model(_input()).sum(), model[-1][0].weight)
        _input()


def takes_from_another_stream() -> None:
    """A stream makes the input, and what it makes next goes behind all that the computation had by then."""
    first, rest, side = _all(nn.Linear(WIDTH, WIDTH, device=DEVICE)), _model(wrap=_all), new_stream(DEVICE)
    with on_stream(side):
        made = _input()
    current_stream(DEVICE).wait_stream(side)
    hidden = first(made)
    del made
    side.wait_stream(current_stream(DEVICE))
    out = rest(hidden)  # The computation waits for older copies here.
    with on_stream(side):
        _input()
    out.sum().backward()


def runs_on_two_streams() -> None:
    model, side = _model(wrap=_all), new_stream(DEVICE)
    for _ in range(2):
        side.wait_stream(current_stream(DEVICE))
        with on_stream(side):
            loss = model(_input()).sum()
        current_stream(DEVICE).wait_stream(side)
        loss.backward()
        del loss


def differentiates_twice() -> None:
    model = _model(wrap=_all)
    x = _input().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    gradient.square().sum().backward()


SCENARIOS: dict[str, Callable[[], None]] = {
    "trains": trains,
    "runs again what is offloaded": lambda: trains(lambda module: checkpoint_wrapper(_all(module))),
    "offloads the arguments": lambda: trains(lambda module: checkpoint_wrapper(module, offload_to_cpu=True)),
    "evaluates": evaluates,
    "stops halfway": stops_halfway,
    "takes from another stream": takes_from_another_stream,
    "runs on two streams": runs_on_two_streams,
    "differentiates twice": differentiates_twice,
}
BOUNDS = {"one at a time": 0, "three": 3 * NBYTES, "all": 2**30}


def _faults(scenario: Callable[[], None], bound_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the detector finds, the host's waits included."""
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_stores", {})
        with detecting() as detector:
            limit_offload_in_flight(bound_bytes, DEVICE)
            with detector.steps():
                scenario()
            torch.zeros(1, device=DEVICE)  # May get any memory that is free by now.
            (own,) = store.stores()
            assert (own.lent_bytes, own.leaving.held_bytes, own.returning.held_bytes) == (0, 0, 0)
    return [*detector.report.faults, *detector.report.host_syncs]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races_and_the_host_never_waits(name: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = _faults(SCENARIOS[name], BOUNDS[bound], monkeypatch)
    assert not faults, faults[0]


WAIT = "self._copies.wait_stream(current_stream(self.device))"
MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "a copy out does not wait": (Store, "put", WAIT, "pass"),
    "a copy back does not wait": (Store, "_copy_back", WAIT, "pass"),
    "nobody waits for what is fetched": (Store, "fetch", ".wait()", ".tensor"),
    "nobody waits for what is let go": (Store, "_bound_leaving", "oldest.wait()", "pass"),
    "what leaves is not held": (Store, "put", "self.leaving.add(transfer)", "pass"),
    "an event behind the computation": (Store, "put", "    transfer = Transfer", "transfer = Transfer"),
    "an event behind the computation, back": (Store, "_copy_back", "    return Transfer", "return Transfer"),
    "the current stream does not wait": (Transfer, "wait", "wait_event(self.done)", "device"),
    "a third stream is not told": (Transfer, "wait", "hold(self.tensor)", "self.tensor"),
    "the allocator is not told": (Transfers, "drop", "hold(transfer.tensor, self._copies)", "pass"),
    "the allocator is told of another stream": (Transfers, "drop", ", self._copies)", ")"),
    "what leaves is let go too soon": (Store, "forget", "transfers.drop", "transfers.take"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_wait_and_hold_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, line, other = MUTANTS[name]
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(line) == 1
    made: dict[str, Any] = {}
    exec(source.replace(line, other), vars(sys.modules[owner.__module__]), made)
    monkeypatch.setattr(owner, method, made[method])
    assert any(
        _faults(scenario, bound_bytes, monkeypatch)
        for bound_bytes in BOUNDS.values()
        for scenario in SCENARIOS.values()
    )


# With DDP ----------------------------------------------------------------------------------------------------


def _steps(ddp: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return [optimizer]


def _sharded(ddp: Any) -> list[Any]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, overlap_with_ddp=True)
    chain(ZeroStep(optimizer, gather="forward")).register(ddp)
    return [optimizer]


CHAINS = {"all-reduce": _steps, "sharded": _sharded}


def _joined(rank: int, world_size: int, chain_name: str) -> None:
    """Ranks with different numbers of batches; the same with and without offloading, in every bit."""
    batches = [torch.randn(ROWS, WIDTH) for _ in range(2 + rank)]
    states = []
    for bound_bytes in (None, *BOUNDS.values()):
        torch.manual_seed(0)
        model = _model(wrap=_all if bound_bytes is not None else (lambda module: module))
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1024 / 2**20)
        store._stores.clear()
        with detecting() as detector:
            limit_offload_in_flight(bound_bytes or 0, DEVICE)
            optimizers = CHAINS[chain_name](ddp)
            with detector.steps(), Join([ddp, *optimizers], lengths=len(batches)):
                for batch in batches:
                    ddp(batch).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            if chain_name == "sharded":
                optimizers[0].wait()
            states.append([p.detach().clone() for p in ddp.parameters()])
            (own,) = store.stores()
            assert (own.leaving.held_bytes, own.returning.held_bytes) == (0, 0)
            assert (own._count > 0) is (bound_bytes is not None)
        detector.report.check()
        store._stores.clear()
    for state in states[1:]:
        assert_parity(state, states[0], what="with offloading")


@pytest.mark.parametrize("chain_name", CHAINS)
def test_with_a_chain_on_ranks_with_uneven_inputs_nothing_races(chain_name: str) -> None:
    run_ranks(_joined, 2, chain_name, backend=STREAMS_BACKEND)
