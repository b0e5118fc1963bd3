"""The optimizers of other packages that are known without a declaration pass the experiment, and the page has them."""

import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.check_optimizer import check
from torch.optim import Optimizer

from overlap.optim.declared import KNOWN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "optimizers.md"

MODULES = (
    "pytorch_optimizer",
    "timm.optim",
    "schedulefree",
    "lion_pytorch",
    "came_pytorch",
    "adan_pytorch",
    "adamp",
    "muon",
    "torch_optimizer",
    "madgrad",
    "prodigyopt",
    "dadaptation",
    "transformers.optimization",
)

# Arguments without defaults.
_NEEDED = {"num_data": 60, "num_iterations": 60}

# These need a gradient of every parameter.
NEEDS_ALL = {"muon.SingleDeviceMuon", "muon.SingleDeviceMuonWithAuxAdam"}

# These take no parameters but matrices.
MATRICES_ONLY = {
    "muon.Muon",
    "muon.SingleDeviceMuon",
    "pytorch_optimizer.LoRARite",
    "pytorch_optimizer.SpectralSphere",
}


def classes() -> dict[str, type[Optimizer]]:
    """The optimizers of those packages that are installed, by the name under which the table knows them."""
    found: dict[str, type[Optimizer]] = {}
    for name in MODULES:
        module = _module(name)
        for cls in vars(module).values() if module is not None else ():
            if inspect.isclass(cls) and issubclass(cls, Optimizer) and not cls.__module__.startswith("torch."):
                found.setdefault(f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}", cls)
    return found


def _module(name: str) -> types.ModuleType | None:
    if name in sys.modules or not _is_installed(name):
        return sys.modules.get(name)
    stands_in = _without_models_of_timm() if name == "timm.optim" else {}
    sys.modules.update(stands_in)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        for each in stands_in:
            del sys.modules[each]


def _without_models_of_timm() -> dict[str, types.ModuleType]:
    """All of timm would import torchvision, which its optimizers do not need."""
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    spec = importlib.util.find_spec("timm")
    package.__path__ = list((spec and spec.submodule_search_locations) or [])
    models.group_parameters = models.named_parameters = None  # type: ignore[attr-defined]
    return {"timm": package, "timm.models": models}


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def arguments(cls: type[Optimizer]) -> dict[str, Any]:
    """For a class whose defaults are not enough, or would leave out weight decay."""
    names = inspect.signature(cls).parameters
    given: dict[str, Any] = {"lr": 1e-2} if "lr" in names else {}
    if "weight_decay" in names:
        given["weight_decay"] = 0.1
    if cls.__name__ == "Adafactor" and "relative_step" in names:
        given["relative_step"] = False
    if "keep_num" in names:  # It would keep ten gradients before the first update.
        given["keep_num"] = 4
    return {**given, **{name: value for name, value in _NEEDED.items() if name in names}}


def grouped(cls: type[Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """An optimizer of ``cls``; Muons want a group of matrices, and one of the rest."""
    if cls.__module__.partition(".")[0] in {"muon", "pytorch_optimizer"} and "use_muon" in inspect.getsource(cls):
        groups = [
            {**group, "params": [p for p in group["params"] if (p.dim() == 2) == is_muon], "use_muon": is_muon}
            for group in groups
            for is_muon in (True, False)
        ]
    return cls(groups, **options)


def differences(name: str, cls: type[Optimizer], options: Mapping[str, Any]) -> dict[str, str]:
    """What the experiment finds against the table's entry for ``cls``."""
    found = check(
        partial(grouped, cls), only_matrices=name in MATRICES_ONLY, all_have_gradients=name in NEEDS_ALL, **options
    )
    units = ("interleaved", "parameter") if KNOWN[name] == "parameter" else tuple(found)
    return {unit: found[unit] for unit in units if found[unit]}


KNOWN_HERE = {name: cls for name, cls in classes().items() if name in KNOWN}


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in KNOWN_HERE}))
def test_what_is_known_steps_in_parts_as_it_does_whole(package: str) -> None:
    torch.set_num_threads(1)
    those = {name: cls for name, cls in KNOWN_HERE.items() if name.startswith(f"{package}.")}
    found = {name: differences(name, cls, arguments(cls)) for name, cls in those.items()}
    assert not {name: what for name, what in found.items() if what}


def test_the_page_shows_what_is_known_and_that_none_is_silently_different() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {row[0]: row[1:] for row in rows if row[0] in classes()}
    assert KNOWN_HERE.keys() <= shown.keys()
    for name, (unit, *signs) in shown.items():
        assert set(signs) <= {"+", "R", "-"}
        assert name not in KNOWN or (unit == KNOWN[name] and signs == ["+"] * 4)
