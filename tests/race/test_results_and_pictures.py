"""What is kept of a race, and what is shown of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from overlap.cli import main
from overlap.errors import ConfigurationError
from overlap.race.command import BEGIN, END
from overlap.race.picture import save_picture
from overlap.race.results import Results
from overlap.race.table import markdown, terminal
from race.cells import cell, course, failed

CELLS = (
    cell("ddp", 0, [0.1, 0.5, 0.96, 0.97], step_s=10, sent=300_000_000),
    cell("ddp", 1, [0.1, 0.5, 0.8, 0.96], step_s=10, sent=300_000_000),
    cell("torch-fp16", 0, [0.1, 0.96, 0.97, 0.97], step_s=30, sent=150_000_000),
    cell("torch-fp16", 1, [0.1, 0.5, 0.96, 0.97], step_s=30, sent=150_000_000),
    cell("overlap-powersgd-r4", 0, [0.1, 0.5, 0.6, 0.7], step_s=2, sent=10_000_000),
    cell("overlap-powersgd-r4", 1, [0.1, 0.5, None, None], step_s=2, sent=10_000_000),
    failed("overlap-int8", 0, "refuses: UnsupportedError: why"),
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "race.json"
    for one in CELLS:
        Results.add(path, course(), one)
    return path


def test_cells_are_read_back_as_they_were_saved_and_replaced_by_later_ones(saved: Path) -> None:
    assert Results.load(saved).cells(course()) == CELLS
    again = cell("ddp", 0, [0.1, 0.2])
    Results.add(saved, course(), again)
    assert set(Results.load(saved).cells(course())) == {*CELLS[1:], again}
    json.loads(saved.read_text(), parse_constant=pytest.fail)  # What is not finite is null.


def test_a_curve_is_not_trained_again_and_a_failure_is(saved: Path) -> None:
    results = Results.load(saved)
    assert results.is_done(course(), "ddp", 1)
    assert not results.is_done(course(), "ddp", 2)
    assert not results.is_done(course(), "overlap-int8", 0)


@pytest.mark.parametrize("changed", [{"ranks": 4}, {"bandwidth": None}, {"steps": 32}, {"machine": "another"}])
def test_what_was_trained_otherwise_belongs_to_another_table(changed, saved: Path) -> None:
    assert not Results.load(saved).is_done(course(**changed), "ddp", 1)
    Results.add(saved, course(**changed), CELLS[0])
    assert len(Results.load(saved).courses) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"courses": [{"task": "digits"}]}'])
def test_a_file_of_something_else_is_named_and_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "race.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"race\.json' holds no results of a race"):
        Results.load(tmp_path / "race.json")
    assert (tmp_path / "race.json").read_text() == text


def test_the_table_has_who_is_slower_than_plain_ddp_and_who_never_arrives() -> None:
    lines = terminal(course(), CELLS, 0.95).splitlines()
    assert lines[0] == (
        "digits, 2 ranks, links of 100mbit: time to accuracy 0.95, ResNet-18 of width 16 (0.70 M parameters)"
    )
    found = {line.split()[0]: line.split()[1:] for line in lines[3:7]}
    assert found["ddp"] == ["25.0", "20.0", "-", "30.0", "1.00", "20", "300.0", "0.965"]
    assert found["torch-fp16"] == ["45.0", "30.0", "-", "60.0", "1.75", "12", "150.0", "0.970"]
    assert found["overlap-powersgd-r4"] == ["never", "(0", "of", "2)", "-", "-", "-", "10.0", "not", "finite"]
    assert found["overlap-int8"] == ["failed"]
    assert "overlap-int8: refuses: UnsupportedError: why" in lines


def test_in_markdown_every_line_has_as_many_cells() -> None:
    lines = markdown(course(), CELLS, 0.95).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert {line.count("|") for line in rows} == {8}
    assert "`overlap-int8`: refuses: UnsupportedError: why" in lines


@pytest.mark.parametrize("count", [1, 3])
def test_the_picture_has_a_panel_for_each_course(count: int, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    sizes = []
    for panels in (1, count):
        courses = {course(ranks=2 + place): CELLS for place in range(panels)}
        save_picture(courses, dict.fromkeys(courses, 0.95), tmp_path / "race.png")
        sizes.append(image.imread(tmp_path / "race.png").shape[:2])
    assert (sizes[1][0] > 1.8 * sizes[0][0] and sizes[1][1] > 1.8 * sizes[0][1]) == (count > 1)


def test_a_loss_that_nobody_brings_down_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = course(task="text")
    cells = [cell("ddp", 0, [5.5, 3.0, None, 2.9]), cell("overlap-int4", 0, [5.5, None, None, None])]
    save_picture({text: cells}, {text: 2.4}, tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


def test_show_prints_and_draws_without_training_and_writes_into_a_page(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    Results.add(saved, replace(course(), task="text", steps=8), cell("ddp", 0, [5.5, 2.0]))
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for _ in range(2):
        assert main(["race", "--show", "--target", "0.5", "--output", str(tmp_path), "--into", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "time to accuracy 0.5" in shown and "time to loss 2.4" in shown
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n\n**digits") and text.endswith(f"\n\n{END}\n\nafter\n")
    assert "old" not in text and text.count("**text, 2 ranks") == 1
    assert (tmp_path / "race.png").exists()
