"""Which saved tensors are kept on the CPU, and copies on simulated streams (tests/streams has the training loops)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from harness import assert_parity
from harness.streams import detecting
from overlap import TrainingLoopError
from overlap._torch.device import current_stream, new_stream, on_stream
from overlap.activations import checkpoint_wrapper, offload, offload_wrapper, offloaded_bytes
from overlap.activations.offload import _Copies

DEVICE = torch.device("cpu")
WIDTH, ROWS = 16, 8
NBYTES = WIDTH * ROWS * 4


class Function(nn.Module):
    """A function of one tensor, with a parameter that scales it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class Subclass(Tensor):
    """Its elements may not be all of it."""


def _sparse(x: Tensor) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), x)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "dense": (lambda x: x.exp(), True),
    "no dimension": (lambda x: x.sum().exp(), True),
    "conjugated": (lambda x: (torch.complex(x, x).conj() * torch.complex(x, -x)).real, True),
    "negated": (lambda x: torch.complex(x, x).conj().imag.square(), True),
    "bfloat16": (lambda x: x.bfloat16().tanh().float(), True),
    "bool": (lambda x: x.masked_fill(x > 0, 1.0).square(), True),
    "with gaps": (lambda x: x[:, ::2].t().square(), True),
    "no elements": (lambda x: x[:0].exp(), False),
    "expanded": (lambda x: x * torch.ones(1, 1).expand_as(x), False),
    "sparse": (_sparse, False),
    "a subclass": (lambda x: x * torch.ones(8, 8).as_subclass(Subclass), False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_tensor_comes_back_and_some_stay_where_they_are(name: str) -> None:
    function, is_stored = FUNCTIONS[name]
    plain = Function(function)
    leaf = torch.randn(8, 8)
    results = []
    for module in (plain, offload_wrapper(plain, min_bytes=0)):
        x = leaf.clone().requires_grad_()
        plain.zero_grad()
        out = module(x)
        more = offloaded_bytes() > leaf.nbytes  # The input is saved for the parameter's gradient.
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        results.append([out.detach().as_subclass(Tensor), x.grad, plain.scale.grad])
    assert more is is_stored
    assert_parity(results[1], results[0], what=name)
    del out
    assert offloaded_bytes() == 0


def _saved_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes that autograd keeps on the device for backward, without parameters, and on the CPU."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(torch.randn(256, 128)).sum()
    return sum(storages.values()), offloaded_bytes() if out.requires_grad else 0


def test_bytes_that_are_kept_for_backward() -> None:
    nbytes = 256 * 128 * 4
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)))
    assert _saved_bytes(model) == (7 * nbytes, 0), "the input of each Linear and the last output"
    assert _saved_bytes(checkpoint_wrapper(model)) == (nbytes, 0), "the arguments"
    assert _saved_bytes(checkpoint_wrapper(model, offload_to_cpu=True)) == (0, nbytes)
    assert _saved_bytes(offload_wrapper(model)) == (0, 12 * nbytes), "a copy for each time that it is saved"
    assert _saved_bytes(offload_wrapper(model, min_bytes=nbytes + 1))[1] == 0
    assert offloaded_bytes() == 0


# Streams -----------------------------------------------------------------------------------------------------


class Gaps(nn.Module):
    """Saves tensors with gaps, conjugated and negated ones, which would be copied through pageable memory."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.view_as_complex(x.view(ROWS, -1, 2))
        product = number.conj() * number[:, :1] * number.conj().imag
        return torch.view_as_real(product).view(ROWS, WIDTH) + x.t()[::2].exp().sum()


def _all(module: nn.Module) -> nn.Module:
    return offload_wrapper(module, min_bytes=0)


def _model() -> nn.Module:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH, device=DEVICE), nn.Tanh()) for _ in range(4)]
    return _all(nn.Sequential(*parts[:-1], Gaps(), parts[-1]))


def _input() -> Tensor:
    return torch.randn(ROWS, WIDTH, device=DEVICE)


def takes_from_another_stream() -> None:
    """A stream makes the input, and allocates again after all that the computation had queued by then."""
    first, rest, side = _all(nn.Linear(WIDTH, WIDTH, device=DEVICE)), _model(), new_stream(DEVICE)
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


def differentiates_twice() -> None:
    model = _model()
    x = _input().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    gradient.square().sum().backward()


SCENARIOS = {"another stream": takes_from_another_stream, "gradients of gradients": differentiates_twice}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races_and_the_host_never_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound_bytes in (0, 3 * NBYTES, 2**30):
        offload._copies_of.cache_clear()
        monkeypatch.setattr(offload, "IN_FLIGHT_BYTES", bound_bytes)
        with detecting() as detector:
            with detector.steps():
                SCENARIOS[name]()
            torch.zeros(1, device=DEVICE)  # May get any memory that is free by now.
            assert offload._copies_of.cache_info().currsize == 1 and offloaded_bytes() == 0
        detector.report.check()
    offload._copies_of.cache_clear()


def test_the_memory_in_flight_is_bounded_and_copies_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "IN_FLIGHT_BYTES", 3 * NBYTES)
    with detecting():
        copies = _Copies(DEVICE)
        stored = [copies.store(torch.full((ROWS, WIDTH), float(number), device=DEVICE)) for number in range(9)]

        def on_the_device() -> list[int]:
            return [number for number, one in enumerate(stored) if one.tensor is not None]

        assert on_the_device() == [6, 7, 8]
        seen = []
        while stored:
            one = stored.pop()
            expected = torch.full((ROWS, WIDTH), float(len(stored)), device=DEVICE)
            assert torch.equal(copies.fetch(one), expected)
            seen.append([number for number in on_the_device() if number < 6])
        assert seen == [[3, 4, 5], [3, 4, 5], [3, 4, 5], [2, 3, 4], [1, 2, 3], [0, 1, 2], [0, 1], [0], []]


def test_a_tensor_changed_in_place_while_it_is_copied_is_an_error_and_later_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "IN_FLIGHT_BYTES", 0)
    with detecting():
        copies = _Copies(DEVICE)
        late, early, there = (torch.ones(WIDTH, device=DEVICE) for _ in range(3))
        stored_late, stored_early = copies.store(late), copies.store(early)
        early.add_(1)
        stored_there = copies.store(there)
        there.add_(1)
        late.add_(1)  # The computation has waited for its copy.
        assert copies.fetch(stored_late)[0] == 1
        for stored in (stored_early, stored_there, stored_early):
            with pytest.raises(TrainingLoopError, match=r"shape \(16,\) that backward needs was changed in place"):
                copies.fetch(stored)
        del stored, stored_late, stored_early, stored_there
