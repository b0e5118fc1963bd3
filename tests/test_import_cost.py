"""Importing the library costs next to nothing beside PyTorch, and its lazy names are as good as others."""

import ast
import inspect
import pickle
import subprocess
import sys

import pytest

import overlap
import overlap.optim

# What takes long to import, and what training without it must not pay for.
SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.optim", "torch.distributed.fsdp", "sympy")
EXTRAS = ("matplotlib", "torchvision", "sklearn", "rich", "lightning", "accelerate", "transformers")
LAZY = pytest.mark.parametrize("package", [overlap, overlap.optim], ids=lambda package: package.__name__)


def test_the_package_imports_nothing_and_a_chain_no_compiler_and_nothing_that_only_commands_need() -> None:
    pickled = pickle.dumps([overlap.Int8(), overlap.ConfigurationError, overlap.ZeroStep])
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "import overlap; print(*set(sys.modules) - before)\n"
        "from overlap import AllReduce, OverlappedOptimizer, PowerSGD, Step, Timeline, chain\n"
        "print(*set(sys.modules) - before)\n"
        f"import pickle; print(pickle.loads({pickled!r}))"
    )
    shown = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    alone, names, loaded = shown.stdout.splitlines()
    assert set(alone.split()) == {"overlap", "overlap._lazy"}
    assert loaded == "[Int8(), <class 'overlap.errors.ConfigurationError'>, <class 'overlap.optim.zero.step.ZeroStep'>]"
    added = set(names.split())
    assert not added & {*SLOW, *EXTRAS}
    # Ours, and a dozen small ones of PyTorch's.
    assert len([name for name in added if not name.startswith("overlap")]) < 40


def test_help_of_the_command_line_does_without_pytorch_and_that_of_the_demo_without_its_extras() -> None:
    program = (
        "import contextlib, sys; from overlap.cli import main\n"
        "for argv in (['--help'], ['demo', '--help']):\n"
        "    with contextlib.suppress(SystemExit): main(argv)\n"
        "    print(*sorted({'torch', 'torchvision', 'sklearn', 'matplotlib'} & sys.modules.keys()), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    without, with_demo = shown.stderr.splitlines()
    assert without == "" and with_demo in ("", "torch")


@LAZY
def test_type_checkers_see_the_parts_that_names_are_found_in(package) -> None:
    """All names of those of ``overlap.optim`` are its own, too."""
    (block,) = (node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If))
    seen = {node.module for node in block.body if isinstance(node, ast.ImportFrom)}
    assert seen == {f"{package.__name__}.{part}" for part in package._PARTS}
    for name in (one for part in overlap.optim._PARTS for one in getattr(overlap.optim, part).__all__):
        assert name in overlap.optim.__all__


@LAZY
def test_lazy_names_are_listed_starred_and_refused_as_others(package) -> None:
    assert {*package.__all__, "__all__"} <= set(dir(package))
    starred: dict[str, object] = {}
    exec(f"from {package.__name__} import *", starred)
    assert set(package.__all__) <= starred.keys()
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'chian'"):
        _ = package.chian
    assert not hasattr(package, "nothing_like_it")
