"""What a reducer remembers, saved and loaded by ``torch.distributed.checkpoint``."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import overlap
from harness import run_ranks
from overlap.ranks.board import of_all_ranks

from .given import Case, assert_same, mesh_of, optimizer_of, raised_by, sharded, step_of, values

REDUCERS = {
    "Int4": lambda: overlap.Quantize(overlap.Int4(), error_feedback=True),
    "PowerSGD": lambda: overlap.PowerSGD(rank=1, min_compression_rate=1),
    # Of the 11 rows of the embedding 6 are compressed, by a factor of 3, and the other shard's 5 would be by 2.7.
    "PowerSGD of some shards": lambda: overlap.PowerSGD(rank=1, min_compression_rate=2.8),
    "route": lambda: overlap.route(
        {
            "*.bias": overlap.Quantize(overlap.TopK(0.5), error_feedback=True),
            "blocks*": overlap.PowerSGD(rank=1, min_compression_rate=1, wire=overlap.Int8()),
            "*": overlap.AllReduce(),
        }
    ),
}


def _made(attachment: str, name: str, shape: tuple[int, int]) -> tuple[Any, Any, Any]:
    model, group = sharded(Case(attachment), mesh=mesh_of(shape))
    registration = overlap.register(model, REDUCERS[name](), group=group)
    return model, registration, optimizer_of(model)


def _save(folder: str, model: Any, registration: Any) -> None:
    dcp.save({"model": model.state_dict(), "overlap": registration.state_dict()}, checkpoint_id=folder)


def _load(folder: str, model: Any, registration: Any) -> None:
    reader = dcp.FileSystemReader(folder)
    state = {"model": model.state_dict(), "overlap": registration.state_dict(reader.read_metadata())}
    dcp.load(state, storage_reader=reader)
    model.load_state_dict(state["model"])
    registration.load_state_dict(state["overlap"])


def _resumed(rank: int, ranks: int, folder: str, attachment: str) -> None:
    for name in REDUCERS:
        model, registration, optimizer = _made(attachment, name, (2, 2))
        for step in range(2):
            step_of(model, optimizer, step)
        model(torch.zeros(1, dtype=torch.long))  # The step has been made.
        _save(f"{folder}/{name}", model, registration)
        momentum, found = copy.deepcopy(optimizer.state_dict()), []
        for step in range(2, 4):
            step_of(model, optimizer, step)
            found.append(values(model))
        other, again, optimizer = _made(attachment, name, (2, 2))
        optimizer.load_state_dict(momentum)
        _load(f"{folder}/{name}", other, again)
        resumed = []
        for step in range(2, 4):
            step_of(other, optimizer, step)
            resumed.append(values(other))
        assert_same(found, resumed, name)
    # Without the metadata errors would silently be left behind.
    _, registration, _ = _made(attachment, "Int4", (2, 2))
    state = {"overlap": registration}
    assert "registration.state_dict(reader.read_metadata())" in raised_by(
        lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(f"{folder}/Int4"))
    )


@pytest.mark.parametrize("attachment", ["hsdp", "group"])
def test_training_resumes_in_every_bit(attachment: str, tmp_path: Path) -> None:
    run_ranks(_resumed, 4, str(tmp_path), attachment)


def _undelivered(registration: Any) -> dict[str, Tensor]:
    """By parameter the sum over replicas of errors of whole parameters; of PowerSGD, the mean."""
    state, sums = registration.state_dict(), {}
    for key, value in state.items():
        path = key.split("|")
        if "error" in path or "residuals" in path:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            sums["|".join(path[2:])] = whole.double() / (
                registration.runtime.context.group.size() if "residuals" in path else 1
            )
    everyone = of_all_ranks(sums, registration.runtime.context.group)
    return {
        key: sum(one[key] for one in everyone if key in one) for key in sorted({k for one in everyone for k in one})
    }


def _saved_for_others(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found = {}
    for name in ("Int4", "route"):
        model, registration, optimizer = _made("hsdp", name, (2, 2))
        for step in range(2):
            step_of(model, optimizer, step)
        model(torch.zeros(1, dtype=torch.long))
        _save(f"{folder}/{name}", model, registration)
        found[name] = _undelivered(registration)
    return found


def _loaded_by_others(rank: int, ranks: int, folder: str, expected: dict[str, Any]) -> None:
    for name, shape in itertools.product(expected, ((ranks, 1), (1, ranks))):
        model, registration, optimizer = _made("hsdp", name, shape)
        _load(f"{folder}/{name}", model, registration)
        loaded = _undelivered(registration)
        assert loaded.keys() == expected[name].keys()
        for key, value in loaded.items():
            # Errors that cancel leave a small sum, rounded as they are themselves.
            rounding = 1e-6 * float(expected[name][key].abs().max())
            torch.testing.assert_close(value, expected[name][key], rtol=0, atol=rounding)
        step_of(model, optimizer, 2)
        assert all(bool(one.isfinite().all()) for one in values(model))


def test_what_is_undelivered_stays_the_same_at_other_numbers_of_replicas_and_shards(tmp_path: Path) -> None:
    expected = run_ranks(_saved_for_others, 4, str(tmp_path))[0]
    assert all(any(bool(one.any()) for one in found.values()) for found in expected.values())
    run_ranks(_loaded_by_others, 3, str(tmp_path), expected)
