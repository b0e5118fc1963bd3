"""`python -m overlap doctor`: whether this installation works, and all that a bug report needs to say of it."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap import AllReduce, OverlappedOptimizer, Step, chain

_DISTRIBUTION = "ddp-overlap"
_LEAST_TORCH = (2, 13)
_PACKAGES = (
    "numpy", "tqdm", "torchvision", "scikit-learn", "matplotlib", "lightning", "accelerate", "transformers", "torchft",
    "torchcomms",
)  # fmt: skip
_VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_PREFIXES = ("NCCL_", "TORCH_NCCL_")
_ONE_QUEUE, _ONE_ORDER, _ALGORITHMS = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_ALGO"
# The first NCCL that has NCCL_LAUNCH_ORDER_IMPLICIT.
_ORDERED_NCCL = (2, 26)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    parser.epilog = "Exits with 1 if something is not compatible. A bug report is best with all that it prints."


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Prints versions, settings and problems; returns 1 if the library cannot work as it is."""
    problems = [*_versions(), *_machine(), *_works()]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("No problem found.")
    return 1 if problems else 0


def _versions() -> Iterator[str]:
    installed = {one.name.lower(): one.version for one in distributions()}
    _line("overlap", f"{overlap.__version__} ({_DISTRIBUTION} {installed.get(_DISTRIBUTION, 'not installed')})")
    _line("python", f"{platform.python_version()} on {platform.platform()}")
    _line("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    _line("packages", ", ".join(f"{name} {installed[name]}" for name in _PACKAGES if name in installed))
    _line("overlap is in", str(Path(overlap.__file__).parent))
    _line("torch is in", str(Path(torch.__file__).parent))
    _line("executable", sys.executable)
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _LEAST_TORCH:
        yield f"torch {torch.__version__} is too old: install {'.'.join(map(str, _LEAST_TORCH))} or later"


def _machine() -> Iterator[str]:
    _line("processor", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    if not dist.is_available():
        yield "this build of torch comes without torch.distributed"
        return
    names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    there = [name for name in names if dist.is_backend_available(name)]
    _line("backends", ", ".join(there) or "none")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    _line("GPUs", "; ".join(gpus) or "none")
    for name, value in sorted(os.environ.items()):
        if name in (*_VARIABLES, _ONE_QUEUE) or name.startswith(_PREFIXES):
            _line(name, value)
    if gpus and "nccl" in there:
        _advise(tuple(torch.cuda.nccl.version()))
    if os.environ.get(_ONE_QUEUE) == "1":
        yield f"{_ONE_QUEUE}=1 puts all streams of a GPU into one queue, so nothing overlaps: unset {_ONE_QUEUE}"
    if "gloo" not in there and "nccl" not in there:
        yield "this build of torch has neither Gloo nor NCCL"


def _advise(nccl: tuple[int, ...]) -> None:
    """Advice on the environment of a run on GPUs; docs/gpus.md has the reasons."""
    _line("NCCL", ".".join(map(str, nccl)))
    if _ONE_ORDER not in os.environ:
        advice = f"export {_ONE_ORDER}=1" if nccl >= _ORDERED_NCCL else "install NCCL 2.26 or later, and set it to 1"
        _line(_ONE_ORDER, f"unset; where two communicators of the same ranks are in use, {advice}")
    if _ALGORITHMS not in os.environ:
        _line(_ALGORITHMS, f"unset; for runs that are equal in every bit, export {_ALGORITHMS}=^NVLS")


def _works() -> Iterator[str]:
    """A chain on one rank; nothing of a build without Gloo."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    try:
        store = dist.HashStore()  # type: ignore[attr-defined] # Exported at run time, but not to type checkers.
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        differing = compare_with_plain()
        _line("a chain, a plain loop", "equal in every bit" if not differing else "NOT EQUAL")
        if differing:
            yield f"{differing} parameters differ between a chain and a plain loop: please report this output"
    except Exception as error:
        yield f"a process group and a model in it do not work here: {type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            # Models and their reducers are in cycles, and hold the group. Its threads must end now and not while the
            # interpreter exits, when a thread that returns to Python is an error.
            gc.collect()
            dist.destroy_process_group()
            gc.collect()


def compare_with_plain() -> int:
    """Trains by ``chain(AllReduce(), Step(...))`` on one rank, and without DDP; returns how many parameters differ in
    any bit."""
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with warnings.catch_warnings(action="ignore"):  # PyTorch's own, from its imports.
        ddp = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.001)  # A bucket a layer.
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-2))
    registration = chain(AllReduce(), Step(optimizer)).register(ddp)
    inputs = torch.arange(32, dtype=torch.float32, device="cpu").view(4, 8) / 32
    for _ in range(4):
        for model, its in ((plain, plain_optimizer), (ddp, optimizer)):
            its.zero_grad()
            model(inputs).square().sum().backward()
            its.step()
    registration.remove()
    pairs = zip(plain.parameters(), ddp.parameters(), strict=True)
    return sum(not torch.equal(one, other) for one, other in pairs)


def _line(name: str, text: str) -> None:
    print(f"{name:<26}{text}")
