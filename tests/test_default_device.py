"""``torch.set_default_device``: whatever it is, the library's own tensors and generators are where gradients are."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from compositions.sentences import Build, local, sharded, with_update
from harness import assert_parity, on_ranks
from overlap import AllReduce, Int4, Int8, Join, PowerSGD, Quantize, chain, route
from overlap._checks import check_device
from overlap._torch.c10d import backend_name
from overlap.errors import UnsupportedError
from overlap.hooks.engine import executors, registration

PACKAGE = Path(overlap.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "Generator", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
# Programs that leave the default device to the user.
_PROGRAMS = ("demo.py",)


def _made_by_default() -> Iterator[str]:
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] in _PROGRAMS:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            is_on_a_device = any(each.arg == "device" for each in node.keywords)
            if is_factory and not is_on_a_device and not (node.func.attr == "Generator" and node.args):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_and_generator_of_the_package_names_its_device() -> None:
    assert list(_made_by_default()) == []


FORMS: dict[str, Build] = {
    "Int4, error feedback": with_update(lambda: Quantize(Int4(), error_feedback=True)),
    "route": with_update(lambda: route({"*.weight": PowerSGD(rank=1), "*": AllReduce()})),
    "ZeroStep in forward": sharded(gather="forward"),
    "LocalSGD": local(start_step=1, wire=Int8()),
}


def _train(build: Build, default: str, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), bucket_cap_mb=1e-3)
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(9 * place + rank)) for place in range(4)]
    torch.set_default_device(default)
    try:
        (optimizer,) = build(ddp)
        # Uneven: rank 0 has a batch less.
        with Join([ddp, optimizer]) as join:
            for batch in join.iterate(batches[rank == 0 :]):
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
                optimizer.step()
        overlap.state_dict(ddp, optimizer) if hasattr(optimizer, "shards") else optimizer.state_dict()
    finally:
        torch.set_default_device("cpu")
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@on_ranks(2, timeout_s=150)
def test_every_form_trains_alike_under_another_default_device(rank: int, world_size: int) -> None:
    # A default device belongs to a thread: small models have their stages run by the training thread.
    with mock.patch.object(executors, "SMALL_BYTES", 2**20):
        for name, build in FORMS.items():
            assert_parity(_train(build, "meta", rank), _train(build, "cpu", rank), what=name)


@on_ranks(1)
def test_a_model_without_values_is_refused_by_its_parameters_names_and_devices_are_checked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.to("meta")
    ddp = DistributedDataParallel(model, init_sync=False)
    with pytest.raises(
        UnsupportedError, match=r"^0\.weight, 0\.bias, 1\.weight, \.\.\.: on the meta device.*model\.to_empty\(device="
    ):
        chain(AllReduce()).register(ddp)

    with (
        mock.patch.object(registration, "check_device", side_effect=UnsupportedError("asked")),
        pytest.raises(UnsupportedError, match="asked"),
    ):
        chain(AllReduce()).register(DistributedDataParallel(nn.Linear(4, 4)))


class _Group:
    """Its backends by device type."""

    def __init__(self, **backends: Any) -> None:
        self._backends = backends

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError
        return self._backends[device.type]


def test_a_device_without_streams_or_without_a_backend_is_refused_by_name() -> None:
    nccl2 = SimpleNamespace(name=lambda: "nccl2")
    wrapped = type("_BackendWrapper", (), {"__module__": "torchcomms._comms", "name": lambda self: "gloo"})()
    group: Any = _Group(cuda=nccl2, cpu=wrapped, mps=wrapped)
    with pytest.raises(UnsupportedError, match=r"on mps:0, which has no streams .*model\.to\('cpu'\)"):
        check_device(torch.device("mps:0"), group)
    with pytest.raises(UnsupportedError, match=r"no backend for xpu: init_process_group\('cpu:gloo,cuda:nccl'\)"):
        check_device(torch.device("xpu"), group)
    for device, name in (("cuda", "nccl2"), ("cpu", "torchcomms"), ("xpu", "none")):
        assert backend_name(group, torch.device(device)) == name
    check_device(torch.device("cuda:1"), group)
    check_device(torch.device("cpu"), group)
