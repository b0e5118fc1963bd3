"""PyTorch's own tests of DDP on Gloo with ``chain(AllReduce())`` on every model on the CPU, beside the same without.

A test that passes without a chain passes with one, or is in :data:`EXCEPTIONS`. A sample runs
here; all 94 with ``python tests/integrations/test_pytorchs_ddp.py``, which takes some ten minutes. 63 pass in plain DDP
without a GPU.
"""

import inspect
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from typing import Any

import torch
import torch.utils._triton
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from overlap import AllReduce, chain

_ONCE = "register_comm_hook or register_builtin_comm_hook can only be called once"
# What must be in the error of a test that passes in plain DDP only.
EXCEPTIONS = {
    # None beside another hook: docs/limits.md.
    "test_ddp_hook_parity_allreduce": _ONCE,
    "test_ddp_hook_parity_allreduce_process_group": _ONCE,
    "test_ddp_hook_parity_post_localSGD": _ONCE,
    "test_ddp_hook_parity_powerSGD": _ONCE,
    "test_ddp_native_mixed_precision_ignored_params": r"reduces with its own hook; use torch\.autocast, or bf16",
    # There is a hook, which DDP logs.
    "test_ddp_comm_hook_logging": "AssertionError: None mismatch: overlap is not None",
    # Refused, with the remedy: docs/join.md.
    "test_ddp_grad_div_uneven_inputs": r"does nothing under PyTorch's Join .*; use `with overlap\.Join",
    # One all-reduce more: ranks meet before DDP compares its new buckets.
    "test_ddp_profiling_torch_profiler": "Expected 6 but got 7",
    # After an error in backward the next forward starts afresh, and the next error is that of its own backward.
    "test_invalid_static_graph": 'prior iteration.* does not match "Your training graph has changed in this iteration',
}
SAMPLE = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_static_graph_nested_types",
    "test_invalid_static_graph",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)
_ENV = {"BACKEND": "gloo", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def _tests() -> type[unittest.TestCase]:
    """PyTorch's tests, each in two forked processes."""
    if "expecttest" not in sys.modules:  # PyTorch's tests import it; those of DDP use nothing of it.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Tests(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Tests


def _concerns_ddp(test: Any) -> bool:
    return "ddp" in test.__name__.lower() or "DistributedDataParallel" in inspect.getsource(test)


class _OnTheCPU(TorchFunctionMode):
    """Most of the tests ask for GPUs, which they hardly need: within it every device is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            is_device = [type(one) in (int, torch.device) or (type(one) is str) for one in args[1:]]
            args = (args[0], *("cpu" if moves else one for one, moves in zip(args[1:], is_device, strict=True)))
        return func(*args, **kwargs)


def _prepare(*, registers: bool) -> None:
    """DDP's models are on the CPU, and each has a chain if it ``registers``."""
    plain = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args[:1], **{**options, "device_ids": None, "output_device": None})
        if registers:
            chain(AllReduce()).register(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    to = nn.Module.to
    nn.Module.to = lambda self, *args, **options: (  # type: ignore[method-assign, assignment]
        self if type(args[0]) is int else to(self, *args, **options)
    )
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda device=None: None)
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.utils._triton.has_triton = lambda: False  # It would ask a CUDA build for the properties of the device.


def _play(kind: str, names: list[str]) -> None:
    """Prints the end of each test: "ok", "skipped", or its error."""
    tests = _tests()
    _prepare(registers=kind == "chain")
    for name in names:
        with _OnTheCPU():
            result = unittest.TextTestRunner(io.StringIO()).run(tests(name))
        errors = [text for _, text in result.errors + result.failures]
        print(json.dumps([name, errors[0] if errors else "skipped" if result.skipped else "ok"]), flush=True)


def _ends(kind: str, names: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            [sys.executable, __file__, kind, *names],
            check=False,
            env={**os.environ, **_ENV, "TEMP_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.seek(0)
        assert done.returncode == 0, log.read()[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["test_'))


def _wrong(names: list[str]) -> tuple[int, list[str]]:
    """How many tests pass in plain DDP, and those that should with a chain and do not."""
    passing = [name for name, end in _ends("plain", names).items() if end == "ok"]
    wrong = []
    for name, end in _ends("chain", passing).items():
        is_right = re.search(EXCEPTIONS[name], end, re.DOTALL) if name in EXCEPTIONS else end == "ok"
        wrong += [] if is_right else [f"{name}: {end[-2000:]}"]
    return len(passing), wrong


def test_pytorchs_own_tests_of_ddp_pass_with_a_chain() -> None:
    count, wrong = _wrong(list(SAMPLE))
    assert count == len(SAMPLE) and not wrong, "\n".join(wrong)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _play(sys.argv[1], sys.argv[2:])
    else:
        os.environ.update(_ENV, TEMP_DIR=tempfile.mkdtemp())
        tests = _tests()
        every = [name for name in dir(tests) if name.startswith("test_") and _concerns_ddp(getattr(tests, name))]
        count, wrong = _wrong(every)
        print(f"{count} of {len(every)} tests pass in plain DDP; with a chain these do not:", *wrong, sep="\n")
        sys.exit(bool(wrong))
