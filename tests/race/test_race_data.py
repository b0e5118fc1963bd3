"""The data of the tasks: the same on every rank and in every run, and never evaluated on what was trained on."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

from overlap.race.loading import load_task
from overlap.race.settings import Settings
from overlap.race.text import documentation, split


def test_the_documentation_is_text_in_english() -> None:
    text = documentation()
    assert len(text) > 300_000 and b"statement" in text
    assert text == documentation()


def test_what_is_held_out_is_not_trained_on_and_nothing_is_lost() -> None:
    text = bytes(byte for block in range(25) for byte in [block] * 2048) + b"\xff" * 100
    train, held_out = split(text)
    assert set(held_out) == {9, 19}
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == len(text)


@pytest.mark.parametrize("task", ["digits", "text"])
def test_ranks_share_out_one_batch_whatever_their_number(task: str) -> None:
    if task == "digits":
        pytest.importorskip("sklearn")
    loaded = load_task(Settings.of(task, batch_size=8, ranks=4))

    def first(seed: int, ranks: int) -> list[torch.Tensor]:
        """The inputs of the first two batches, of all ranks together."""
        own = [itertools.islice(loaded.batches(seed, rank, ranks), 2) for rank in range(ranks)]
        return [torch.cat([inputs for inputs, _ in batch]) for batch in zip(*own, strict=True)]

    four = first(0, 4)
    assert all(map(torch.equal, four, first(0, 4)))
    assert not torch.equal(four[0], four[1])
    assert not torch.equal(four[0], first(1, 4)[0])
    assert len(four[0]) == 8
    if task == "text":
        two = load_task(Settings.of(task, batch_size=8, ranks=2)).batches(0, 1, 2)
        assert torch.equal(next(two)[0], four[0][4:])


def test_targets_of_text_are_the_bytes_that_follow() -> None:
    inputs, targets = next(load_task(Settings.of("text", batch_size=4)).batches(0, 0, 2))
    assert inputs.shape == (2, 32)
    assert torch.equal(inputs[:, 1:], targets.view(2, 32)[:, :-1])


def test_any_file_can_be_the_text(tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(bytes(range(256)) * 100)
    task = load_task(Settings.of("text", data=str(tmp_path / "book"), width=8))
    assert task.data.startswith("25,600 bytes of book")
    with torch.no_grad():
        assert 5 < task.evaluate(task.make_model().eval()) < 7  # Of 256 bytes one is guessed: about 5.5.


def test_cifar_is_read_from_the_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    from overlap._torchvision import load_torchvision

    kind = load_torchvision().datasets.CIFAR10
    folder = tmp_path / kind.base_folder
    folder.mkdir()

    def write(name: str, content: object) -> tuple[str, str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return name, hashlib.md5(data).hexdigest()

    def images(count: int, value: int) -> dict[str, object]:
        return {"data": numpy.full((count, 3072), value, dtype=numpy.uint8), "labels": [value % 10] * count}

    monkeypatch.setattr(kind, "train_list", [write("data_batch_1", images(20, 255))])
    monkeypatch.setattr(kind, "test_list", [write("test_batch", images(6, 0))])
    name, md5 = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(kind, "meta", {"filename": name, "key": "label_names", "md5": md5})
    task = load_task(Settings.of("cifar", data=str(tmp_path), batch_size=8, width=4))
    inputs, labels = next(task.batches(0, 0, 2))
    assert task.data.startswith("20 images of CIFAR-10")
    assert inputs.shape == (4, 3, 32, 32) and bool((inputs == 1).all())
    assert labels.tolist() == [5] * 4
    assert task.evaluate(lambda batch: torch.eye(10)[[0] * len(batch)]) == 1
