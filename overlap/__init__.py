"""Let everything that must happen to a gradient run in DDP's backward.

``__all__`` lists the names that most programs need. The other public names of the packages, such as PyTorch's names in
``overlap.hooks`` and ``overlap.optim``, are attributes of ``overlap``, too. Each is imported when it is first used.

>>> import overlap
>>> overlap.chain(overlap.AllReduce())
chain(AllReduce())
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from overlap._lazy import missing_name as _missing_name

if _TYPE_CHECKING:
    from overlap.activations import *
    from overlap.compose import *
    from overlap.errors import *
    from overlap.hooks import *
    from overlap.join import *
    from overlap.optim import *
    from overlap.plan import *
    from overlap.quantized import *
    from overlap.resume import *
    from overlap.timeline import *

__all__ = [
    "AllGather",
    "AllReduce",
    "BFloat16",
    "Bucket",
    "Cast",
    "ClipGradNorm",
    "DivideByCount",
    "Float16",
    "Float8",
    "Int4",
    "Int8",
    "Join",
    "JoinHook",
    "Joinable",
    "LocalSGD",
    "Log",
    "OptimizerHookState",
    "OverlapError",
    "OverlappedOptimizer",
    "PowerSGD",
    "Quantize",
    "ReduceScatter",
    "SkipNonFinite",
    "Stage",
    "Step",
    "Timeline",
    "TopK",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "auto",
    "auto_quantize",
    "chain",
    "checkpoint_wrapper",
    "declare",
    "hook_then_optimizer",
    "load_state_dict",
    "offload_wrapper",
    "register",
    "route",
    "state_dict",
]

__version__ = "0.1.0"

# In the order in which they import each other: a name of an early one is found without importing the later ones.
_PACKAGES = (
    "errors",
    "join",
    "hooks",
    "optim",
    "timeline",
    "compose",
    "resume",
    "quantized",
    "activations",
    "plan",
)


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES:
        return _import_module(f"{__name__}.{name}")
    for package in () if name.startswith("_") else _PACKAGES:
        module = _import_module(f"{__name__}.{package}")
        if name in module.__all__:
            value = globals()[name] = getattr(module, name)
            return value
    raise _missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))])
