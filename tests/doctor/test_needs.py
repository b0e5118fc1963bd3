"""The table of what is used of PyTorch's private parts is what the code uses."""

from __future__ import annotations

import ast
from pathlib import Path

import overlap._torch
from overlap._torch.needs import NEEDS, Need, missing_names

MODULES = [path for path in Path(overlap._torch.__file__).parent.glob("*.py") if path.name != "needs.py"]
# Looked for in objects that are made elsewhere, or by name, and done without: by torch.compile, by LR schedulers,
# by DDP for parameters to ignore, by a backend for its timeout, by Lightning, in operators, by Python.
_ELSEWHERE = {
    "_amp_foreach_non_finite_check_and_unscale_",
    "_c10d_functional",
    "_ddp_ignored",
    "_FabricOptimizer",
    "_foreach_zero_",
    "_getframe",
    "_opt_called",
    "_orig_mod",
    "_overlap_only_watches",
    "_schema",
    "_timeout",
    "_wrapped_by_lr_sched",
}


def _private(text: str) -> bool:
    return text.startswith("_") and not text.startswith("__") and text.isidentifier()


def _used(tree: ast.AST) -> set[str]:
    """Attributes and strings that begin with an underscore."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in attributes | strings if _private(name)}


def _own(tree: ast.AST) -> set[str]:
    """What the module defines or sets on its own objects."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def test_every_private_name_that_is_used_is_looked_for() -> None:
    trees = [ast.parse(path.read_text()) for path in MODULES]
    used = set().union(*map(_used, trees)) - set().union(*map(_own, trees)) - _ELSEWHERE
    listed = {part for need in NEEDS for name in need.names + need.optional for part in name.split(".")}
    assert used <= listed, f"add to overlap/_torch/needs.py: {sorted(used - listed)}"


def test_every_name_that_is_looked_for_is_used() -> None:
    code = "\n".join(path.read_text() for path in MODULES)
    unused = [name for need in NEEDS for name in need.names + need.optional if name.rpartition(".")[2] not in code]
    assert unused == []


def test_what_is_not_there_is_named_whole() -> None:
    need = Need("counting", ("number.real", "number._gone.part", "number.real._gone"))
    assert missing_names(need.names, {"number": 1}) == ["number._gone.part", "number.real._gone"]
