"""`overlap demo`: every option trains what it says, and the verdict is right."""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from overlap import _link
from overlap.cli import main
from overlap.demo import (
    TRAIN_IMAGES,
    add_arguments,
    largest_difference,
    load_digits,
    present,
    shard,
    start_runs,
)


def _options(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--images", "64", "--epochs", "1", "--image-size", "8", *typed])


def _equal_runs(*typed: str) -> subprocess.CompletedProcess[str]:
    """The command's output, after a comparison that found the same bits."""
    command = [sys.executable, "-m", "overlap", "demo", *typed]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: parameters, optimizer state and buffers are the same in every bit." in done.stdout
    return done


def test_two_ranks_end_up_equal() -> None:
    # As little as it takes to have a second step, with the buckets that DDP rebuilds after the first.
    tiny = ["--images", "128", "--epochs", "1", "--image-size", "8", "--seed", "3"]
    done = _equal_runs(*tiny)
    assert "step/s" in done.stderr
    (accuracies,) = re.findall(r"accuracy on the test split +(\S+) +(\S+)", done.stdout)
    (step_ms,) = re.findall(r"step, median +(\S+) ms +(\S+) ms", done.stdout)
    assert accuracies[0] == accuracies[1] and all(float(ms) > 0 for ms in step_ms)


_CAN_LINK = (
    _link.missing_requirement() is None and not subprocess.run(["unshare", "--net", "true"], check=False).returncode
)
needs_namespaces = pytest.mark.skipif(not _CAN_LINK, reason="network namespaces need root")


@needs_namespaces
def test_on_a_link_a_compressing_chain_is_trained_too() -> None:
    # In one step each rank sends 45 MB of gradients.
    tiny = ["--images", "64", "--epochs", "1", "--image-size", "8", "--link", "400mbit"]
    done = _equal_runs(*tiny)
    (step_ms,) = re.findall(r"step, median +(\S+) ms +(\S+) ms +(\S+) ms", done.stdout)
    assert all(float(ms) > 8e3 * 40 / 400 for ms in step_ms[:2]) and float(step_ms[2]) > 8e3 * 10 / 400
    assert "On links of 400mbit chain(Quantize(Int8()), Step(SGD, interleaved)) takes" in done.stdout


_LINKED = """
import ctypes, os, time
from overlap import _link
_link.open_bridge()
names, bridge = [os.readlink("/proc/self/ns/net")], os.getpid()
reads, writes = os.pipe()
if os.fork() == 0:
    _link.join_bridge(bridge, 0, bytes_per_s=1e8)
    os.write(writes, os.readlink("/proc/self/ns/net").encode())
    ctypes.CDLL(None).prctl(1, 9)  # Ends when its parent does.
    time.sleep(60)
print(*names, os.read(reads, 100).decode(), flush=True)
time.sleep(60)
"""


@needs_namespaces
def test_nothing_is_left_of_a_link_whose_process_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _LINKED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        names = set(process.stdout.readline().split())
        process.kill()
    assert len(names) == 2 and str(Path("/proc/self/ns/net").readlink()) not in names
    deadline_s = time.monotonic() + 10
    while names & _namespaces():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _namespaces() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(process.readlink()))
    return found


def test_without_root_a_link_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for link, words in (("1gbit", "network namespaces need root; leave it out"), ("fast", "'fast' is not a speed")):
        with pytest.raises(SystemExit):
            main(["demo", "--link", link])
        assert words in capsys.readouterr().err


def _registered(rank: int, world_size: int) -> list[str]:
    options = _options("--chain", "int4"), _options("--chain", "zero", "--optimizer", "adamw")
    return [start_runs(each, torch.device("cpu"))[1].chain for each in options]


def test_the_options_decide_what_is_registered() -> None:
    int4, zero = run_ranks(_registered, 2)[0]
    assert int4 == "chain(Quantize(Int4(), error_feedback=True), Step(SGD, interleaved))"
    assert zero == "chain(ZeroStep(AdamW, interleaved))"


def _results(difference: float, *, accuracy: float = 0.97, chain: str = "step") -> dict[str, Any]:
    run = {"chain": "a chain", "accuracy": 0.97, "step_ms": 10.0, "loss": 1.0}
    is_exact = chain == "step"
    return {
        "runs": {"plain DDP": run, "overlapped": run | {"accuracy": accuracy}},
        "largest_differences": {"parameters": 0.0, "optimizer state": difference, "buffers": 0.0},
        "must_be_equal": is_exact,
        "passed": not difference if is_exact else accuracy > 0.96,
    }


def test_the_verdict_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for chain, difference, accuracy, code, verdict in (
        ("step", 0.0, 0.97, 0, "Equal: "),
        ("step", math.inf, 0.97, 1, "NOT EQUAL: the largest difference is inf"),
        ("int8", 0.1, 0.97, 0, "Compared by accuracy (these gradients are compressed"),
        ("int8", 0.1, 0.9, 1, "LESS ACCURATE"),
    ):
        options = _options("--chain", chain)
        assert present(_results(difference, accuracy=accuracy, chain=chain), options) == code, verdict
        assert verdict in capsys.readouterr().out


def test_the_largest_difference_is_infinite_where_a_value_is_not_finite() -> None:
    one = {"weight": torch.tensor([1.0, 2.0]), "step": 3}
    changed = ({}, {"weight": torch.tensor([1.0, 2.5])}, {"step": 4}, {"weight": torch.tensor([1.0, math.nan])})
    assert [largest_difference(one, one | other) for other in changed] == [0.0, 0.5, 1.0, math.inf]


def test_ranks_share_out_every_image_once_in_an_order_of_each_epoch() -> None:
    digits = load_digits(image_size=8, images=TRAIN_IMAGES, device=torch.device("cpu"))
    assert digits.train_images.shape == (TRAIN_IMAGES, 3, 8, 8)
    assert digits.train_images.min() == -1 and digits.train_images.max() == 1
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    numbered = dataclasses.replace(digits, train_labels=torch.arange(TRAIN_IMAGES))

    def images(rank: int, epoch: int = 0) -> list[int]:
        batches = shard(numbered, epoch=epoch, seed=0, rank=rank, ranks=2, batch_size=32)
        return torch.cat([own for _, own in batches]).tolist()  # type: ignore[no-any-return]

    first, second = images(0), images(1)
    assert len(first) == len(second) == 22 * 32
    assert len(set(first + second)) == len(first + second)
    assert images(0) == first != images(0, epoch=1)
