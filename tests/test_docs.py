"""The site names every page and every public name, and what its guides show works as it stands."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_public_names import NAMES

from benchmarks import estimates
from harness.documented import examples_on_one_rank
from overlap import estimate

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SHOWN = [ROOT / "README.md", *PAGES]
CHECKED = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "design").glob("*.md")]
BLOCK = re.compile(r"(<!-- fragment -->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRONT = "index.md"
"""README.md, on the site."""


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_navigation_names_every_page_but_reports() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r"[\w/.-]+\.md\b", nav)
    assert sorted(named) == sorted(
        {page.relative_to(DOCS).as_posix() for page in PAGES if page.parent.name != "reports"} | {FRONT}
    )


def _reference() -> list[str]:
    return [
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


def _of_frameworks() -> list[str]:
    """The public names of the integrations, as their sources say: the frameworks need not be there."""
    folder = ROOT / "overlap" / "integrations"
    found = []
    for framework in ("lightning", "accelerate", "transformers", "torchft"):
        source = next(
            path for path in (folder / f"{framework}.py", folder / framework / "__init__.py") if path.exists()
        )
        (names,) = re.findall(r"^__all__ = (\[.*\])$", source.read_text(), re.MULTILINE)
        found += [f"overlap.integrations.{framework}.{name}" for name in ast.literal_eval(names)]
    return found


def test_the_reference_has_every_public_name_once() -> None:
    documented = [path.rpartition(".")[2] for path in _reference() if "overlap.integrations." not in path]
    assert sorted(documented) == sorted({name for names in NAMES.values() for name in names})
    assert sorted(path for path in _reference() if "overlap.integrations." in path) == sorted(_of_frameworks())


def test_the_reference_names_things_where_they_are_imported_from() -> None:
    for path in set(_reference()) - set(_of_frameworks()):
        package, _, name = path.rpartition(".")
        assert name in NAMES[package]
        assert package == "overlap" or name not in NAMES["overlap"]


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page's relative links lead to, and the anchors in them."""
    for target in re.findall(r"\]\(([^)\s]+)", _prose(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield page.parent / path if path else page, anchor


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, and of the names that its reference shows."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings]
    names = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", heading) for heading in words} | set(names)


@pytest.mark.parametrize("page", CHECKED, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = list(_links(page))
    assert [path for path, _ in links if not path.exists()] == []
    assert [
        f"{path.name}#{anchor}"
        for path, anchor in links
        if anchor and path.suffix == ".md" and anchor not in _anchors(path.resolve())
    ] == []


def _blocks(page: Path) -> list[str]:
    """The Python blocks of a page that can run: all but those after a line ``<!-- fragment -->``."""
    return [block for fragment, block in BLOCK.findall(page.read_text()) if not fragment]


def _is_program(block: str) -> bool:
    return "init_process_group" in block


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("page", [page for page in SHOWN if _blocks(page)], ids=_name)
def test_what_is_shown_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in _blocks(page):
        if not _is_program(block):
            with examples_on_one_rank() as namespace:
                exec(compile(block, str(page), "exec"), namespace)


def test_a_program_that_is_shown_is_the_smallest_example() -> None:
    """That one runs in ``test_examples.py``; every other block runs after the lines of the reference."""
    example = (ROOT / "examples" / "train.py").read_text().split("\n\n", 1)[1]
    programs = {_name(page): block for page in SHOWN for block in _blocks(page) if _is_program(block)}
    assert programs.pop("README.md") == f"# torchrun --nproc-per-node 2 train.py\n{example}"
    assert list(programs) == ["docs/api/index.md", "docs/guides/sharded-models.md"]


def test_figures_show_the_tables_of_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    for name, text in importlib.import_module("draw_figures").figures().items():
        assert (DOCS / "images" / name).read_text() == text, "python docs/draw_figures.py draws it anew"


def test_the_table_of_phases_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    assert importlib.import_module("draw_lifecycle").table() in (DOCS / "reports" / "phases.md").read_text()


def test_the_table_of_the_reference_leads_to_every_name() -> None:
    table = (DOCS / "api" / "index.md").read_text()
    assert [path for path in _reference() if f"#{path})" not in table] == []


def _table(page: Path) -> str:
    return "\n".join(re.findall(r"^\|.*$", page.read_text(), re.MULTILINE))


def _run(heading: str) -> tuple[dict[str, float], float]:
    """The first table after ``heading`` in the report of step times: ms a step of each row; and the link's Gbit/s."""
    _, found, rest = (DOCS / "reports" / "step-times.md").read_text().partition(f"## {heading}\n")
    assert found
    table, _, _ = rest.partition("\nTimes are of")
    (gbit,) = re.findall(r"\((\d\.\d+) Gbit/s measured\)", table)
    rows = re.findall(r"^\| \**([\w-]+)\** \| (\d+\.\d) \|", table, re.MULTILINE)
    return {name: float(ms) for name, ms in rows}, float(gbit)


def test_figures_of_the_front_page_are_measured() -> None:
    """Ratios to DDP in its table are those of one run, and the slow link's those of the page about GPUs."""
    ms, _ = _run("The run of the front page")
    shown = re.findall(r"\b\d\.\d\d\b", _table(ROOT / "README.md"))
    assert shown == [
        f"{ms[name] / ms['ddp-adamw-fused' if name.endswith('adamw') or 'zero' in name else 'ddp-sgd']:.2f}"
        for name in (
            "overlap-fp16", "torch-fp16", "overlap-quantize8", "overlap-powersgd-r4", "overlap-local-sgd",
            "torch-averager", "overlap-zero-adamw", "overlap-zero-adamw-gather-forward", "torch-zero-adamw",
            "overlap-step-adamw", "torch-hook-then-optimizer-adamw",
        )
    ]  # fmt: skip
    front = (ROOT / "README.md").read_text()
    link = dict(re.findall(r"^\| \**`?([^|`*]+)`?\** \| \**(\d+)\** \| ", (DOCS / "gpus.md").read_text(), re.MULTILINE))
    for name, times in (("Quantize(Int8())", "2.8"), ("PyTorch's bf16 hook", "1.6")):
        assert f"{int(link['DDP']) / int(link[name]):.1f}" == times
        assert f"{times} times" in front and f" {link[name]}" in front


def test_figures_of_the_races_are_those_of_the_report() -> None:
    parts = re.findall(r"^\| `[^`]+` \| .* \| (\d\.\d\d) \|", (DOCS / "reports" / "races.md").read_text(), re.MULTILINE)
    shown = re.findall(r"\b\d\.\d\d\b", _table(DOCS / "time-to-accuracy.md"))
    assert len(shown) == 44
    assert set(shown) <= set(parts)


def test_the_grid_of_estimates_is_what_the_command_prints() -> None:
    grid = "\n".join(estimates.grid())
    assert grid in (DOCS / "choose.md").read_text(), "python -m benchmarks.estimates"
    job = estimate.Job()
    plain, *others = [(chain, estimate.step_ms(job, chain)) for chain in estimate.CHAINS]
    for chain, ms in others:
        if chain.is_hybrid:
            assert f"| `{chain.name}` | {ms:.0f} | {plain[1] / ms:.2f} |" in (DOCS / "gpus.md").read_text()


def test_the_estimate_of_the_front_page_is_that_of_its_command() -> None:
    chains = {chain.name: chain for chain in estimate.CHAINS}
    ratios = []
    for microbatches in (1, 8):
        job = estimate.Job(link_gbit=10, machines=2, microbatches=microbatches)
        assert (job.ranks_a_machine, job.tokens) == (8, 8192)
        plain = estimate.step_ms(job, chains["DDP"])
        ratios += [
            f"{plain / estimate.step_ms(job, chains[name]):.1f}" for name in ("Quantize(Int8())", "Cast(bfloat16)")
        ]
    int8, bfloat16, int8_of_many, bfloat16_of_many = ratios
    front = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"`Quantize(Int8())` is estimated to be {int8} times as fast as DDP, and a bfloat16 hook {bfloat16} times"
        in front
    )
    assert f"with eight times the tokens {int8_of_many} and {bfloat16_of_many}." in front
    assert f"65,536: `Int8` {int8_of_many})" in (DOCS / "choose.md").read_text()


@pytest.mark.parametrize("run", ["The run of the front page", "An earlier run of the front page's command"])
def test_estimates_agree_with_the_measured_rows_within_a_quarter(run: str) -> None:
    """ResNet-18 on two CPU ranks; compute and the link as measured in the same run, 8.1 GB/s of memory for a core."""
    measured, gbit = _run(run)
    job = estimate.Job(
        parameters=11.7e6, link_gbit=gbit, machines=2, ranks_a_machine=1, compute_ms=measured["compute-only"],
        memory_gb=8.1, update_bytes=12, cpu=True,
    )  # fmt: skip
    chains = {chain.name: chain for chain in estimate.CHAINS}
    for row, name in {
        "ddp-sgd": "DDP",
        "overlap-bf16": "Cast(bfloat16)",
        "overlap-quantize8": "Quantize(Int8())",
        "overlap-powersgd-r4": "PowerSGD(rank=4)",
        "overlap-local-sgd": "LocalSGD(period=8)",
        "overlap-zero-adamw-gather-forward": "ZeroStep(gather='forward')",
    }.items():
        assert 0.75 < estimate.step_ms(job, chains[name]) / measured[row] < 1.25, name
