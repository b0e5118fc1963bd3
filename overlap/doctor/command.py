"""`python -m overlap doctor`: does this installation work, and what does a bug report need to say of it?"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import overlap
from overlap.bench.link import missing_requirement
from overlap.bench.results import describe_machine
from overlap.doctor.shadows import DISTRIBUTION, installed_version, other_distributions, other_places
from overlap.doctor.trial import Missing, compare_with_plain, missing_of_torch, own_group

__all__ = ["add_arguments", "run"]

_LEAST_TORCH = (2, 11)
_PACKAGES = ("numpy", "tqdm", "torchvision", "scikit-learn", "matplotlib", "rich", "lightning", "accelerate",
             "transformers")  # fmt: skip
_EXTRAS = {
    "demo": ("torchvision", "sklearn", "matplotlib"),
    "bench": ("rich", "matplotlib"),
    "timeline": ("matplotlib",),
}
_VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_PREFIXES = ("NCCL_", "TORCH_NCCL_")
_WIDTH = 34


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    parser.epilog = "Exits with 1 if something is not compatible. A bug report is best with all that it prints."


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Prints what is there and what is missing; returns 1 if the library cannot work as it is."""
    problems = [*_versions(), *_places(), *_machine(), *_needs()]
    _head("In short")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("No problem found.")
    return 1 if problems else 0


def _versions() -> Iterator[str]:
    _head("Versions")
    _line("overlap", f"{overlap.__version__} ({DISTRIBUTION} {installed_version() or 'not installed'})")
    _line("python", f"{platform.python_version()} on {platform.platform()}")
    _line("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    for name in _PACKAGES:
        try:
            _line(name, version(name))
        except PackageNotFoundError:
            continue
    for extra, modules in _EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        _line(
            f"extra {extra}",
            f"{', '.join(missing)} missing: pip install '{DISTRIBUTION}[{extra}]'" if missing else "complete",
        )
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _LEAST_TORCH:
        yield f"torch {torch.__version__} is too old: install {'.'.join(map(str, _LEAST_TORCH))} or later"


def _places() -> Iterator[str]:
    _head("Where it is imported from")
    _line("overlap", str(Path(overlap.__file__).parent))
    _line("torch", str(Path(torch.__file__).parent))
    _line("executable", sys.executable)
    for place in other_places():
        _line("another overlap", f"{place}, which is not imported here, but may be from another folder")
    for name in other_distributions():
        yield (
            f"{name} installs a package called overlap, too, over this one: run pip uninstall {name}, and install "
            f"{DISTRIBUTION} again"
        )


def _machine() -> Iterator[str]:
    _head("Machine")
    machine = describe_machine()
    _line("processor", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB")
    backends: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available,
    } if dist.is_available() else {}  # fmt: skip
    _line("backends", ", ".join(name for name, is_there in backends.items() if is_there()) or "none")
    gpus = machine.get("gpus", [])
    _line("GPUs", "; ".join(gpus) or "none")
    if gpus and backends.get("nccl", bool)():
        _line("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    _line("links of a set speed", missing_requirement() or "can be made (--bandwidth)")
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name.startswith(_PREFIXES):
            _line(name, value)
    if not backends:
        yield "this build of torch comes without torch.distributed"
    elif not (dist.is_gloo_available() or dist.is_nccl_available()):
        yield "this build of torch has neither Gloo nor NCCL"


def _needs() -> Iterator[str]:
    """The private parts that are missing, and a chain on one rank; nothing of a build without Gloo."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    _head(f"Private parts of torch {torch.__version__} that are used")
    try:
        with own_group():
            found = missing_of_torch()
            yield from filter(None, map(_need, found))
            _head("A chain beside plain DDP, one rank on Gloo")
            differing = compare_with_plain()
            _line("AllReduce, Step of AdamW", "equal in every bit" if not differing else "NOT EQUAL")
            if differing:
                yield f"{differing} parameters differ between a chain and plain DDP: please report it with this output"
    except Exception as error:
        _line("failed", f"{type(error).__name__}: {error}")
        yield f"a process group and a model in it do not work here: {type(error).__name__}: {error}"


def _need(found: Missing) -> str | None:
    if found.names:
        _line(found.need.purpose, f"MISSING {', '.join(found.names)}")
        return (
            f"torch {torch.__version__} lacks {', '.join(found.names)}, without which there is no "
            f"{found.need.purpose}: take a version that is tested (README.md, Limits)"
        )
    without = f", does without {', '.join(found.optional)}" if found.optional else ""
    _line(found.need.purpose, f"ok{without}")
    return None


def _head(text: str) -> None:
    print(f"\n{text}")


def _line(name: str, text: str) -> None:
    print(f"  {name:<{_WIDTH}} {text}")
