"""The examples of docs/transforms.md run, and do what the page says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overlap
from harness import run_ranks, wrap
from harness.models import MLP

_PAGE = Path(__file__).parents[3] / "docs" / "transforms.md"


def _examples(rank: int, world_size: int, page: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        names: dict[str, Any] = {
            "torch": torch,
            "overlap": overlap,
            "ddp": ddp,
            "batches": [(*batch.inputs, batch.target) for batch in MLP.batches(rank, steps=4)],
            "loss_fn": nn.functional.mse_loss,
            "norms": [],
            "reports": [],
        }
        exec(example, names)
        assert all(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert len(names["norms"]) == (4 if "clip.norm" in example else 0)
        assert [step for step, _ in names["reports"]] == ([0, 2] if "Log" in example else [])
        for parameter in ddp.parameters():
            everyone = [torch.empty_like(parameter) for _ in range(world_size)]
            torch.distributed.all_gather(everyone, parameter.detach())
            assert all(torch.equal(everyone[0], other) for other in everyone)


def test_the_examples_of_the_page() -> None:
    run_ranks(_examples, 2, _PAGE.read_text())


def test_the_page_lists_every_transform() -> None:
    shipped = set(overlap.hooks.transforms.__all__) - {"Transform"}
    assert set(re.findall(r"^\| `(\w+)\(.*?\)` \|", _PAGE.read_text(), flags=re.MULTILINE)) >= shipped
