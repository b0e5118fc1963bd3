"""What is there: the device, versions, and which packages are missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.given import Given
from benchmarks.measuring import proc_bytes, proc_value

# What is done without each.
_PACKAGES = {
    "pytest": "the tests are played by the parts' own checks alone",
    "matplotlib": "there are no pictures",
    "triton": "there are no Triton kernels, and torch.compile cannot be tried on a GPU",
}


def cases(given: Given) -> list[str]:
    return ["versions", "packages"]


def run(case: str, given: Given) -> None:
    if case == "versions":
        _versions(given)
    else:
        _packages(given)


def _versions(given: Given) -> None:
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{proc_value('/proc/cpuinfo', 'model name') or platform.processor()}, {os.cpu_count()} cores, "
        f"{proc_bytes('/proc/meminfo', 'MemTotal') / 2**30:.0f} GiB",
    }
    name = facts["processor"]
    if given.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU; the dry run is: make gpu DEVICE=cpu")
        properties = torch.cuda.get_device_properties(0)
        name = properties.name
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        facts |= {
            "GPU": f"{torch.cuda.device_count()} x {name}, {properties.multi_processor_count} multiprocessors, "
            f"compute capability {properties.major}.{properties.minor}",
            "GPU memory": f"{total_bytes / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} GiB free",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "not there",
            "driver": _driver(),
        }
    for what, value in facts.items():
        given.row("", {"what": what, "value": value})
    given.data("name", name)
    given.data("facts", facts)
    given.data("sentence", "; ".join(f"{what} {value}" for what, value in facts.items() if what in _IN_SENTENCE) + ".")


_IN_SENTENCE = ("torch", "python", "CUDA", "NCCL", "driver")


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else "unknown"


def _packages(given: Given) -> None:
    for name, without in _PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            given.row("Missing packages", {"package": name, "without it": without})
            given.data(f"missing {name}", True)
