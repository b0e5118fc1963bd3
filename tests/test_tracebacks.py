"""An error of the library's shows the loop's line and the remedy, and none of the library's own frames beyond one."""

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compositions.sentences import Build, sharded, with_update
from harness import on_ranks
from overlap import AllReduce, ConfigurationError, OverlapError, chain

Touch = Callable[[Any], Any]


FORMS: dict[str, Build] = {"plain": lambda ddp: [None], "Step": with_update(AllReduce), "ZeroStep": sharded()}


def _loop(form: str) -> SimpleNamespace:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    (optimizer,) = FORMS[form](ddp)
    return SimpleNamespace(ddp=ddp, optimizer=optimizer)


def _backward(of: Any) -> None:
    of.ddp(torch.ones(2, 4)).sum().backward()


def _several(*calls: Touch) -> Touch:
    return lambda of: [call(of) for call in calls]


def _of_module(of: Any) -> None:
    of.ddp.module(torch.ones(2, 4)).sum().backward()


# The wrong loop, and how many frames of the library's it may show.
WRONG: dict[str, tuple[Touch, int]] = {
    "two backwards": (_several(_backward, _backward), 2),
    "zero_grad() before step()": (_several(_backward, lambda of: of.optimizer.zero_grad()), 1),
    "step() twice": (_several(_backward, lambda of: of.optimizer.step(), lambda of: of.optimizer.step()), 1),
    "a clip": (_several(_backward, lambda of: nn.utils.clip_grad_norm_(of.ddp.parameters(), 0.1)), 2),
    "model(x)": (_several(_of_module, lambda of: of.optimizer.step()), 1),
    "registered twice": (lambda of: chain(AllReduce()).register(of.ddp), 2),
}


def _frames(error: BaseException, package: str = "/overlap/") -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__) if package in frame.filename]


def _wrong_loops() -> None:
    for form in ("Step", "ZeroStep"):
        for name, (play, most) in WRONG.items():
            with pytest.raises(OverlapError) as raised:
                play(_loop(form))
            frames = _frames(raised.value)
            assert len(frames) <= most, f"{form}, {name}: {frames}"


def test_all_frames_are_shown_if_the_environment_asks_for_them(monkeypatch) -> None:
    def shown() -> int:
        with pytest.raises(OverlapError) as raised:
            chain(AllReduce()).register(nn.Linear(1, 1))
        return len(_frames(raised.value))

    hidden = shown()
    monkeypatch.setenv("OVERLAP_FULL_TRACEBACK", "1")
    assert shown() > hidden


def _mine(bucket: Any) -> None:
    raise ConfigurationError("of the user's stage")


def _fails(bucket: Any) -> None:
    raise IndexError("of the user's stage")


def _in_stage() -> list[tuple[str, bool, bool]]:
    found = []
    for function in (_mine, _fails):
        of = _loop("plain")
        chain(AllReduce(), function).register(of.ddp)
        try:
            _backward(of)
        except Exception as error:
            shown = "".join(traceback.format_exception(error))
            found.append((type(error).__name__, f"in {function.__name__}" in shown, "wavefront.py" in shown))
    return found


@on_ranks(2)
def test_a_wrong_loop_shows_its_own_frames_a_stage_those_of_the_user_and_a_foreign_error_all() -> None:
    _wrong_loops()
    expected = [("ConfigurationError", True, False), ("IndexError", True, True)]
    assert _in_stage() == expected
