"""Let everything that must happen to a gradient run in DDP's backward.

``__all__`` lists the names that most programs need. The other public names of the packages, such as PyTorch's names in
``overlap.hooks`` and ``overlap.optim``, are attributes of ``overlap``, too. Each is imported when it is first used.

>>> import overlap
>>> overlap.chain(overlap.AllReduce())
chain(AllReduce())
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from overlap._lazy import lazy_names as _lazy_names

if _TYPE_CHECKING:
    from overlap.compose import *
    from overlap.errors import *
    from overlap.hooks import *
    from overlap.join import *
    from overlap.optim import *
    from overlap.plan import *
    from overlap.resume import *
    from overlap.timeline import *
else:
    _PARTS = ("errors", "join", "hooks", "optim", "timeline", "compose", "resume", "plan")
    __getattr__, __dir__ = _lazy_names(__name__, _PARTS)

__all__ = [
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
    "LocalSGD",
    "Log",
    "OptimizerHookState",
    "OverlapError",
    "OverlappedOptimizer",
    "PowerSGD",
    "Quantize",
    "SkipNonFinite",
    "Stage",
    "Step",
    "Timeline",
    "TopK",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "auto",
    "chain",
    "declare",
    "hook_then_optimizer",
    "load",
    "load_state_dict",
    "register",
    "route",
    "save",
    "state_dict",
]

__version__ = "0.1.0"
