"""Public names that are imported when they are first used, and those that the package no longer has.

Importing all of the library takes a second or two, most of it in packages of PyTorch's that ``import torch`` leaves
out (``torch._dynamo``, ``torch.distributed.optim``). A package that lists its names here costs next to nothing until
one of them is used; everything else is as with names that were imported at once (PEP 562).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

_CHECKPOINT = (
    "call torch.utils.checkpoint.checkpoint(module, *inputs, use_reentrant=False), or use "
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
)
_OFFLOAD = "run the module's forward in the block: with torch.autograd.graph.save_on_cpu(pin_memory=True)"
_QUANTIZE = (
    "give the collective tensor.to(torch.bfloat16), and for gradients use overlap.Quantize(overlap.Int8()) in a chain"
)
_EIGHT_BITS = "use overlap.Quantize(overlap.Int8()), which sends and keeps no more on many ranks than on two"

REMOVED = {
    "AddNoise": "write the three lines of docs/transforms.md: a function of a bucket is a transform",
    "AllGather": "use AllReduce(), which sends W/2 times less on W ranks",
    "AdamW8bit": "use torchao's or bitsandbytes' AdamW8bit, in Step(optimizer, deferred=True) or after overlap.declare",
    "Checkpointed": _CHECKPOINT,
    "Centralize": "write the three lines of docs/transforms.md: a function of a bucket is a transform",
    "Average": "call averager.average_parameters(ddp.parameters()) after the update, or use overlap.LocalSGD",
    "CheckpointError": "catch torch.distributed.checkpoint.CheckpointException",
    "CheckpointManager": "save overlap.state_dict(...) with torch.distributed.checkpoint; see docs/resuming.md",
    "ClipValue": "write the three lines of docs/transforms.md: a function of a bucket is a transform",
    "DQuantType": _QUANTIZE,
    "ElasticLocalSGD": "use torchft, whose LocalSGD and DiLoCo outlive a lost group of ranks",
    "GatherQuantized": _EIGHT_BITS,
    "Hierarchical": "use Quantize(wire), which on several machines sends the wire between them alone",
    "HierarchicalModelAverager": "give PostLocalSGDOptimizer PyTorch's, of "
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager",
    "JoinHook": "use torch.distributed.algorithms.join.JoinHook",
    "Joinable": "use torch.distributed.algorithms.join.Joinable",
    "Offloaded": _OFFLOAD,
    "QuantizationOverflowError": "use warnings.filterwarnings('error', message='.*values too large')",
    "Scale": "write the three lines of docs/transforms.md: a function of a bucket is a transform",
    "allgather_then_aggregate_hook": "use overlap.hooks.allreduce_hook",
    "apply_activation_checkpointing": _CHECKPOINT,
    "auto_quantize": _QUANTIZE,
    "batched_powerSGD_hook": "use overlap.PowerSGD(), which is closer to the gradients",
    "broadcast": "await overlap.hooks.all_reduce(tensor), after tensor.zero_() on the other ranks",
    "by_ndim": "write a function: def is_matrix(name, parameter): return parameter.ndim >= 2",
    "checkpoint_wrapper": _CHECKPOINT,
    "offload_wrapper": _OFFLOAD,
    "quantization_perchannel_hook": _EIGHT_BITS,
    "quantization_pertensor_hook": _EIGHT_BITS,
    "save_reports": "use Timeline.export_chrome_trace('trace.json'), and open it in ui.perfetto.dev",
    "uses_current_stream": "use overlap.declare(cls, 'element') or overlap.declare(cls, 'parameter')",
}
"""Names that the package had, and their replacements; kept for one release."""


def missing_name(package: str, name: str) -> Exception:
    """The error for a ``name`` that ``package`` does not have; where it had it, the message says what to use instead.

    ``from package import name`` shows the message of an ``ImportError`` alone; ``hasattr`` takes an ``AttributeError``
    alone.
    """
    if name not in REMOVED:
        # Python suggests a similar name of ``dir(package)``.
        return AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
    message = f"{package}.{name} has been removed: {REMOVED[name]}"
    is_from_import = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(message, name=package) if is_from_import else AttributeError(message)


def check_imported_as(module: str, package: str) -> None:
    """Raise an ImportError if a package of this library is imported by way of a link to its folder.

    It would be a second copy, whose classes are not those of ``package``.
    """
    if module != package:
        raise ImportError(f"import {package}, not {module}: {module} is a link to the folder of {package}", name=module)


def lazy_names(package: str, parts: Sequence[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that finds names in its parts when they are first used.

    Args:
        package: its name.
        parts: modules in it, whose public names it has, too, in the order in which they import each other: a name of an
            early one is found without importing the later ones. They are attributes of the package themselves.
    """

    def get(name: str) -> Any:
        if name in parts:
            return import_module(f"{package}.{name}")
        for part in () if name.startswith("_") else parts:
            module = import_module(f"{package}.{part}")
            if name in module.__all__:
                value = getattr(module, name)
                setattr(sys.modules[package], name, value)
                return value
        raise missing_name(package, name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*own["__all__"], *parts, *(name for name in own if name.startswith("__"))})

    return get, names
