"""Each private name of PyTorch that the library uses is in one table; a PyTorch without one is refused at import."""

import ast
import re
from pathlib import Path

import pytest
import torch

import overlap
from overlap._torch.private import FSDP_USES, LATE_USES, USES, Use, check_private_parts

FOLDER = Path(overlap.__file__).parent
# Python's, Lightning's, parts of names, and an owner.
OTHERS = {"_getframe", "_replace", "_FabricOptimizer", "_optimizer_", "_split_sizes", "_profiler"}
# PyTorch's that not every supported version or build has, or that are attributes of what C++ makes.
ASKED_FOR = {
    "_allgather_base",
    "_allow_empty_param_list",
    "_delay_all_reduce_all_params",
    "_delay_all_reduce_params",
    "_devices",
    "_in_backward_optimizers",
    "_need_device_dtype_check_for_fused",
    "_schema",
    "_st_info",
    "_timeout",
    "_torchdynamo_orig_callable",
    "_use_python_reducer",
}
LISTED = {name for use in (*USES, *FSDP_USES, *LATE_USES) for name in use.names.split()}


def _asked() -> tuple[set[str], set[str]]:
    """The names with an underscore that the package asks objects for, and those that it defines itself."""
    trees = [
        ast.parse(path.read_text())
        for path in FOLDER.rglob("*.py")
        if path.name != "private.py" and path.parent.name != "integrations"
    ]
    own: set[str] = set()
    asked: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
        elif isinstance(node, ast.Attribute):
            asked.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            asked |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            asked.add(node.value)
    private = {name for name in asked if re.fullmatch(r"_[a-zA-Z]\w*[a-z]\w*", name) and "overlap" not in name}
    return private, own


def test_the_table_has_what_the_package_uses_and_nothing_else() -> None:
    asked, own = _asked()
    assert asked - own - OTHERS - ASKED_FOR - LISTED == set(), "not in the table"
    assert {name for name in LISTED if name.startswith("_")} - asked == set(), "not used any more"


def test_this_pytorch_has_all_of_it_and_one_that_lacks_some_is_refused_with_its_names(monkeypatch) -> None:
    check_private_parts((*USES, *FSDP_USES, *LATE_USES))
    pinned = re.search(r"^torch==(.*)$", (FOLDER.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    monkeypatch.delattr(torch.nn.parallel.DistributedDataParallel, "_sync_final_model")
    monkeypatch.delattr(torch, "_chunk_cat")
    lacks = (
        r"lacks private names that overlap uses: torch\._chunk_cat \(packing .*\), torch.*_sync_final_model \(the last"
    )
    with pytest.raises(ImportError, match=rf"{lacks}.*pip install torch=={re.escape(pinned[1])}$"):
        check_private_parts()


def test_a_name_that_is_gone_from_the_code_of_a_class_or_a_function_is_named() -> None:
    owner = "torch.distributed.fsdp._fully_shard"
    gone = (
        Use(f"{owner}._fsdp_param.FSDPParam", "sharded_size _gone", "shards", ""),
        Use(f"{owner}._fsdp_collectives.foreach_reduce", "all_reduce_hook _moved", "what it calls", ""),
    )
    with pytest.raises(ImportError, match=r"FSDPParam\._gone \(shards\), torch\S*foreach_reduce\._moved \(what"):
        check_private_parts(gone)
