"""The examples of docs/transforms.md run, and do what the page says of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overlap
from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error

_PAGE = Path(__file__).parents[3] / "docs" / "transforms.md"


def _examples(rank: int, world_size: int, page: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 4
    *shipped, functions, chained = examples
    for example in (*shipped, functions + chained):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        names: dict[str, Any] = {
            "torch": torch,
            "overlap": overlap,
            "ddp": ddp,
            "loader": [(*batch.inputs, batch.target) for batch in MLP.batches(rank, steps=4)],
            "loss_fn": nn.functional.mse_loss,
        }
        exec(example, names)
        assert all(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert len(names.get("norms", [])) == (4 if "clip.norm" in example else 0)
        assert [step for step, _ in names.get("reports", [])] == ([0, 2] if "Log" in example else [])
        for parameter in ddp.parameters():
            everyone = [torch.empty_like(parameter) for _ in range(world_size)]
            torch.distributed.all_gather(everyone, parameter.detach())
            assert all(torch.equal(everyone[0], other) for other in everyone)


def test_the_examples_of_the_page() -> None:
    run_ranks(_examples, 2, _PAGE.read_text())


def _clip(gradient: Tensor) -> None:
    gradient.clamp_(-0.1, 0.1)


def _centralize(gradient: Tensor) -> None:
    if gradient.dim() > 1:
        gradient.sub_(gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True))


def _functions(rank: int, world_size: int, page: str) -> None:
    """Each function of the page, behind the reducer, beside the same by hand."""
    names: dict[str, Any] = {"torch": torch, "generator": torch.Generator().manual_seed(0)}
    exec(re.findall(r"```python\n(def scale.*?)```", page, flags=re.DOTALL)[0], names)
    by_hand = {"scale": lambda gradient: gradient.mul_(0.5), "clip_value": _clip, "centralize": _centralize}
    assert {name for name, value in names.items() if inspect.isfunction(value)} == {*by_hand, "add_noise"}
    for name in (*by_hand, "add_noise"):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        overlap.chain(overlap.AllReduce(), names[name]).register(ddp)
        for model in (plain, ddp):
            (100 * mean_squared_error(model, MLP.batch(0, rank))).backward()
        differs = False
        for one, other in zip(plain.parameters(), ddp.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            differs |= not torch.equal(one.grad, other.grad)
            if name == "add_noise":
                noise = other.grad - one.grad
                assert noise.numel() < 100 or 0.5e-3 < float(noise.std()) < 2e-3
                continue
            by_hand[name](one.grad)
            assert torch.equal(other.grad, one.grad), name
        assert differs, f"{name} does nothing, which shows nothing"


def test_the_functions_of_the_page() -> None:
    run_ranks(_functions, 2, _PAGE.read_text())


def test_the_page_lists_every_transform() -> None:
    shipped = set(overlap.hooks.transforms.__all__) - {"Transform"}
    assert set(re.findall(r"^\| `(\w+)\(.*?\)` \|", _PAGE.read_text(), flags=re.MULTILINE)) >= shipped
