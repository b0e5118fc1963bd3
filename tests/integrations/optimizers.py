"""Optimizers of other packages, beside plain DDP on two ranks.

``PYTHONPATH=tests python tests/integrations/optimizers.py`` writes docs/reports/optimizers.md. Names behind it, like
``pytorch_optimizer.Lion`` or ``timm``, play those alone and print their rows.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tools.check_optimizer import check
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness import run_ranks
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.errors import OverlapError
from overlap.optim.declared import KNOWN

__all__ = ["LEFT_OUT", "PAGE", "REASONS", "arguments", "classes", "differences", "known_here", "play"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "optimizers.md"

PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer",
    "timm.optim": "timm",
    "schedulefree": "schedulefree",
    "lion_pytorch": "lion-pytorch",
    "came_pytorch": "came-pytorch",
    "adan_pytorch": "adan-pytorch",
    "adamp": "adamp",
    "muon": "muon-optimizer",
    "torch_optimizer": "torch-optimizer",
    "madgrad": "madgrad",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "transformers.optimization": "transformers",
}
"""Modules, and the distributions that they come from."""

# Why an optimizer is not stepped in parts: a word of LEFT_OUT, and what the page says.
REASONS = {
    "alignment": "the last bit of its matrix products depends on where a gradient lies in memory",
    "batch": "computes with several parameters at once, and rounds differently with others",
    "beside": "keeps state beside that of its parameters",
    "broken": "fails with some shapes, or records autograd's graph in its state",
    "closure": "needs a closure",
    "collectives": "issues collectives",
    "global": "computes a value from all parameters, or does with one of its options",
    "hessian": "differentiates a second time",
    "mode": "must be switched between train() and eval()",
    "model": "takes the model",
    "names": "other classes of its package have the same name",
    "object": "keeps objects with tensors in its state",
    "place": "looks up a value by the place of a group",
    "precision": "rounds otherwise where another parameter of its group is complex",
    "random": "draws random numbers, or does with one of its options",
    "unread": "has not been examined",
    "wraps": "wraps another optimizer",
}

LEFT_OUT = {
    f"{package}.{name}": reason
    for package, reasons in {
        "dadaptation": {"global": "DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD"},
        "madgrad": {"beside": "MADGRAD MirrorMADGRAD"},
        "muon": {"collectives": "Muon MuonWithAuxAdam"},
        "prodigyopt": {"global": "Prodigy"},
        "pytorch_optimizer": {
            "alignment": "SOAP SPlus ScalableShampoo Shampoo",
            "batch": "AdaGO AdaMuon Muon MuonClip NorMuon SpectralSphere",
            "beside": "EmoFact EmoLynx EmoNavi FlashAdamW MADGRAD StableSPAM",
            "closure": "AliG BSAM",
            "collectives": "DeMo DistributedMuon",
            "global": """
                ASGD AdaGC Adai AdamS Adan AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Lamb
                LoRARite Prodigy Ranger21 SWATS
            """,
            "hessian": "AdaHessian SophiaH",
            "mode": "ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD",
            "model": "AdaLOMO AdamMini LOMO",
            "object": "Conda",
            "place": "AdaBound",
            "precision": "Amos SGDSaI VSGD",
            "random": "APOLLO Alice DASH Fira GaLore Gravity Kron ROSE SPAM SaRA",
            "wraps": """
                FriendlySAM GSAM LookSAM Lookahead Magma OrthoGrad PCGrad SAM SafeFP16Optimizer ScheduleFreeWrapper TRAC
                WSAM
            """,
        },
        "pytorch_ranger": {"beside": "Ranger", "unread": "RangerQH RangerVA"},
        "schedulefree": {
            "closure": "AdamWScheduleFreeClosure RAdamScheduleFreeClosure SGDScheduleFreeClosure",
            "mode": """
                AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree SGDScheduleFree
                SGDScheduleFreeReference
            """,
        },
        "timm": {
            "batch": "AdaBelief LaProp",
            "global": "Adafactor Lamb",
            "hessian": "Adahessian",
            "wraps": "Lookahead",
        },
        "torch_optimizer": {
            "alignment": "Shampoo",
            "beside": "MADGRAD",
            "broken": "Adafactor Apollo",
            "global": "RAdam SWATS",
            "hessian": "Adahessian",
            "place": "AdaBound",
            "wraps": "Lookahead",
        },
        "transformers": {"model": "LayerWiseDummyOptimizer"},
    }.items()
    for reason, names in reasons.items()
    for name in names.split()
}
"""Why the others of these packages are not in the table."""

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

_PAGE = """# Optimizers of other packages

An update is made in parts where it runs in backward (interleaved), or where ranks share it (ZeRO). That is exact only
for an optimizer whose parts do not depend on each other. The library has a table of those that it knows,
`KNOWN` in `overlap/optim/declared.py`: PyTorch's own, and {known} optimizers of other packages, which are not imported
for it. An entry is there because the class passes an experiment and its source confirms it for all steps and all
options. All third-party ones are known by parameter: ZeRO gives a rank whole parameters. Others are refused by name
before any collective, unless you declare them:

<!-- fragment -->
```python
overlap.declare(MyOptimizer, "parameter")
```

**Any optimizer is exact in the deferred form**, `Step(OverlappedOptimizer(optimizer), deferred=True)`, which calls its
`step()` with all gradients there.

The table below shows what each form did on two ranks, beside plain DDP with the same optimizer, in {steps} steps of a
small network with two groups, a learning rate that changes, weight decay and gradients of several sizes. Parameters
were compared bit for bit after each step, and state and groups at the end. With torch {torch}, on CPUs.

| | |
| --- | --- |
| + | exact: the same in every bit |
| R | refused: an error at registration, which shows `declare` and `deferred=True` |
| - | not played: it needs more than parameters, a model or a closure for instance |

So many are exact:

{counts}

`PYTHONPATH=tests .venv-integrations/bin/python tests/integrations/optimizers.py` plays them and writes this page (`make
test-integrations` makes the environment). Names behind it, such as `timm.Lion`, play those alone. `make
test-integrations` makes the experiment with their defaults and weight decay.

## Not played

- **torchao**: `step()` compiles its update with `torch.compile(fullgraph=True)`. **heavyball** compiles, too. Deferred
  only.
- **bitsandbytes**: an optimizer looks for the options of a parameter by the place of its group and its place in it,
  which a part would change. Deferred only.
- **galore-torch**, **apollo-torch**: their state has objects with projections, and in apollo-torch these depend on the
  place of a parameter. Deferred only.
- **adabelief-pytorch** keeps a cache of step sizes in the group, and gives fp16 parameters other memory. Deferred only.
- **kron-torch** draws random numbers, and **adam-mini** takes the model. Deferred only.
- The updates that **pytorch-optimizer** compiles (`create_optimizer(..., compile=True)`) were not played.
- A class that derives from a known one and overrides its `step` is not known.

## All

{rows}
"""

STEPS = 10
FORMS = ("deferred", "interleaved", "ZeRO", "ZeRO deferred")


class Model(nn.Module):
    """Parameters of every number of dimensions, some of odd sizes, one larger than 4096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.wide = nn.Linear(64, 77)
        self.norm = nn.LayerNorm(77)
        self.tall = nn.Linear(77, 33, bias=False)
        self.square = nn.Linear(33, 33)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.convolution(inputs)).flatten(1)
        hidden = self.norm(torch.tanh(self.wide(hidden)))
        return self.square(torch.tanh(self.tall(hidden))) * self.scale


class Matrices(nn.Module):
    """No parameters but matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(108, 77, bias=False), nn.Tanh(), nn.Linear(77, 33, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs.flatten(1))


def classes() -> dict[str, type[Optimizer]]:
    """The optimizers of those packages that are installed, by the name under which the table knows them."""
    found: dict[str, type[Optimizer]] = {}
    for name in PACKAGES:
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


def _version(package: str) -> str:
    modules = {module.partition(".")[0]: name for module, name in PACKAGES.items()}
    return importlib.metadata.version(modules.get(package, package))


def known_here() -> dict[str, type[Optimizer]]:
    """Those of :func:`classes` that are in the table."""
    return {name: cls for name, cls in classes().items() if name in KNOWN}


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
    return cls(_muon_groups(cls, groups), **options)


def _muon_groups(cls: type[Optimizer], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if cls.__module__.partition(".")[0] not in {"muon", "pytorch_optimizer"} or "use_muon" not in inspect.getsource(
        cls
    ):
        return groups
    return [
        {**group, "params": [p for p in group["params"] if (p.dim() == 2) == is_muon], "use_muon": is_muon}
        for group in groups
        for is_muon in (True, False)
    ]


def differences(name: str, cls: type[Optimizer], options: Mapping[str, Any]) -> dict[str, str]:
    """What the experiment finds against the table's entry for ``cls``."""
    found = check(
        partial(grouped, cls), only_matrices=name in MATRICES_ONLY, all_have_gradients=name in NEEDS_ALL, **options
    )
    units = ("interleaved", "parameter") if KNOWN[name] == "parameter" else tuple(found)
    return {unit: found[unit] for unit in units if found[unit]}


def _play(rank: int, world_size: int, names: Sequence[str]) -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    found, cells = classes(), {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plain = _train(rank, "plain", name, found[name])
            except Exception as error:
                cells[name] = dict.fromkeys(FORMS, f"unplayed: {type(error).__name__}: {error}")
                continue
            cells[name] = {form: _cell(rank, form, name, found[name], plain) for form in FORMS}
    return cells


def _cell(rank: int, form: str, name: str, cls: type[Optimizer], plain: Sequence[Any]) -> str:
    try:
        trained = _train(rank, form, name, cls)
    except OverlapError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"
    for step, (one, other) in enumerate(zip(plain, trained, strict=True)):
        if (where := _difference("", one, other)) is not None:
            return f"differs: {where} after step {step + 1}"
    return "="


def _train(rank: int, form: str, name: str, cls: type[Optimizer]) -> list[Any]:
    torch.manual_seed(1)
    model = Matrices() if name in MATRICES_ONLY else Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008, gradient_as_bucket_view=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [group for group in _muon_groups(cls, [{"params": matrices}, {"params": others}]) if group["params"]]
    if form.startswith("ZeRO"):
        zero = ZeroRedundancyOptimizer(groups, cls, **arguments(cls))
        chain(ZeroStep(zero, deferred=form.endswith("deferred"))).register(ddp)
        optimizer: Any = zero
    else:
        inner = cls(groups, **arguments(cls))
        getattr(inner, "train", lambda: None)()
        optimizer = inner if form == "plain" else OverlappedOptimizer(inner)
        if form != "plain":
            chain(AllReduce(), Step(optimizer, deferred=form == "deferred")).register(ddp)
    rates = [group.get("lr") for group in optimizer.param_groups]
    history = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(rate, float):
                group["lr"] = rate * (1 - step / 20)
        inputs = torch.randn(3, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        (ddp(inputs).square().mean() * (1.0, 1e-3, 30.0)[step % 3]).backward()
        optimizer.step()
        history.append([p.detach().clone() for p in model.parameters()])
    if form.startswith("ZeRO"):
        optimizer.consolidate_state_dict(0)
        history.append(optimizer.state_dict() if rank == 0 else {})
    else:
        state = optimizer.state_dict()
        history.append(state if rank == 0 else {})
    return history


def _difference(where: str, one: Any, other: Any) -> str | None:
    """The first value that is not the same bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = (
            one.dtype == other.dtype and one.shape == other.shape and bool(torch.all((one == other) | (one != one)))
        )
        return None if is_same and torch.equal(one != one, other != other) else where
    if type(one) is not type(other):
        return where
    if isinstance(one, (list, tuple, deque)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    elif hasattr(one, "__dict__") and not isinstance(one, (type, Callable)):
        one, other = vars(one), vars(other)
    if not isinstance(one, dict):
        return None if one == other or one != one or callable(one) else where
    if one.keys() != other.keys():
        return f"{where} {min(map(str, one.keys() ^ other.keys()))}"
    found = (_difference(f"{where} {key}", one[key], other[key]) for key in one)
    return next((what for what in found if what is not None), None)


def play(names: Sequence[str], *, at_once: int = 24) -> dict[str, dict[str, str]]:
    """What becomes of each form of each optimizer on two ranks, beside plain DDP."""
    cells: dict[str, dict[str, str]] = {}
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        print(f"{start} of {len(names)}: {part[0]} ...", file=sys.stderr, flush=True)
        one, other = run_ranks(_play, 2, part, timeout_s=900, group_timeout_s=120)
        for name in part:
            both = {form: (one[name][form], other[name].get(form, "")) for form in one[name]}
            cells[name] = {form: min(pair, key=lambda cell: cell == "=") for form, pair in both.items()}
    return cells


def written(cells: Mapping[str, Mapping[str, str]]) -> str:
    """The page."""
    rows, counts = [], []
    for package in dict.fromkeys(name.partition(".")[0] for name in cells):
        those = {name: row for name, row in cells.items() if name.startswith(f"{package}.")}
        exact = [sum(row[form] == "=" for row in those.values()) for form in FORMS]
        played = sum(not row["deferred"].startswith("unplayed") for row in those.values())
        counts.append([f"{package} {_version(package)}", len(those), played, *exact])
        rows += [
            [name, KNOWN.get(name, REASONS.get(LEFT_OUT.get(name, ""), "")), *map(_sign, map(row.get, FORMS))]
            for name, row in those.items()
        ]
    counts.append(["all", *(sum(column) for column in list(zip(*counts, strict=True))[1:])])
    return _PAGE.format(
        known=sum(not name.startswith("torch.") for name in KNOWN),
        steps=STEPS,
        torch=importlib.metadata.version("torch").partition("+")[0],
        counts=_table(["package", "optimizers", "played", *FORMS], counts),
        rows=_table(["optimizer", "unit, or why it has none", *FORMS], rows),
    )


def _sign(cell: str | None) -> str:
    kinds = {"=": "+", "refused": "R", "unplayed": "-"}
    return kinds.get((cell or "").partition(":")[0], "differs")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---", "---", *[":-:"] * (len(head) - 2)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    import json

    from optimizers import play as _play_on_ranks  # By a name under which ranks find it, too.

    wanted = tuple(sys.argv[1:])
    chosen = [name for name in classes() if not wanted or name.startswith(wanted)]
    if wanted:
        print(json.dumps(_play_on_ranks(chosen), indent=1))
    else:
        PAGE.write_text(written(_play_on_ranks(chosen)))
