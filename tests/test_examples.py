"""What a new user copies works as it stands."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from harness import run_ranks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


_SMALL = "transformer.py --layers 1 --width 64 --context 32"
_SHARDED = "hsdp.py --layers 1 --width 64 --context 32"
RUNS = {
    "transformer.py": f"{_SMALL} --steps 10 --update plain",
    **{update: f"{_SMALL} --steps 10 --update {update}" for update in ("overlapped", "sharded")},
    "transformer.py, stopped": f"{_SMALL} --save-every 4 --checkpoint {{folder}}/gpt --steps 4",
    "transformer.py, resumed": f"{_SMALL} --save-every 4 --checkpoint {{folder}}/gpt --steps 10",
    "digits.py": "digits.py --width 4 --size 8 --batch 128 --epochs 3",
    "digits.py, stopped": "digits.py --width 4 --size 8 --batch 128 --checkpoint {folder}/digits --epochs 1",
    "digits.py, resumed": "digits.py --width 4 --size 8 --batch 128 --checkpoint {folder}/digits --epochs 3",
    "diloco.py": "diloco.py --period 4 --steps 20",
    "diloco.py, stopped": "diloco.py --period 4 --checkpoint {folder}/diloco --steps 8",
    "diloco.py, resumed": "diloco.py --period 4 --checkpoint {folder}/diloco --steps 20",
    "checkpoint.py": "checkpoint.py --steps 15",
    "checkpoint.py, stopped": "checkpoint.py --checkpoint {folder}/checkpoint --steps 5",
    "checkpoint.py, resumed": "checkpoint.py --checkpoint {folder}/checkpoint --steps 15",
    "join.py": "join.py --samples 200 --epochs 3",
    "join.py, stopped": "join.py --samples 200 --checkpoint {folder}/join --epochs 1",
    "join.py, resumed": "join.py --samples 200 --checkpoint {folder}/join --epochs 3",
    "hsdp.py": f"{_SHARDED} --steps 8",
    "hsdp.py, stopped": f"{_SHARDED} --save-every 4 --checkpoint {{folder}}/hsdp --steps 4",
    "hsdp.py, resumed": f"{_SHARDED} --save-every 4 --checkpoint {{folder}}/hsdp --steps 8",
}


def _run(rank: int, world_size: int, runs: list[list[str]]) -> list[str]:
    """What each of the runs of a script prints, one after another in a group that is there already."""
    warnings.resetwarnings()
    sys.path.insert(0, str(EXAMPLES))
    os.environ.update(MPLBACKEND="Agg", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group = dist.destroy_process_group = lambda *backend: None
    printed = []
    for sys.argv in runs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(sys.argv[0], run_name="__main__")
        printed.append(out.getvalue())
    return printed


def _on_two_ranks(*runs: list[str], ranks: int = 2) -> list[str]:
    """What rank 0 prints."""
    return run_ranks(_run, ranks, list(runs), timeout_s=170)[0]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What rank 0 of two prints in each of the runs."""
    folder = tmp_path_factory.mktemp("examples")
    runs = [f"{EXAMPLES}/{run.format(folder=folder)}".split() for run in RUNS.values()]
    of_two = [run for run in runs if "hsdp.py" not in run[0]]
    of_four = [run for run in runs if "hsdp.py" in run[0]]
    return dict(zip(RUNS, _on_two_ranks(*of_two) + _on_two_ranks(*of_four, ranks=4), strict=True))


def test_the_program_of_the_front_page_learns() -> None:
    (printed,) = _on_two_ranks([f"{EXAMPLES}/train.py"])
    losses = [float(loss) for _, loss in re.findall(r"step (\d+): loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]


def test_the_program_of_the_guide_on_sharded_models_learns(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "sharded-models.md").read_text()
    (tmp_path / "sharded.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    (printed,) = _on_two_ranks([f"{tmp_path}/sharded.py"], ranks=4)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]


def test_a_transformer_learns_the_same_as_with_plain_ddp(printed: dict[str, str]) -> None:
    plain, overlapped, sharded = (_losses(printed[run]) for run in ("transformer.py", "overlapped", "sharded"))
    assert len(plain) == 10
    assert float(plain[-1][0]) < 0.8 * float(plain[0][0])
    assert overlapped == plain
    assert sharded == plain


def _losses(printed: str) -> list[tuple[str, ...]]:
    """Loss and, where an example prints it, accuracy or norm of weights, as often as it prints them."""
    return re.findall(r"loss (\S+?)(?:, (?:accuracy|norm of weights) (\S+))?(?:\s|$)", printed)


@pytest.mark.parametrize("example", ["checkpoint.py", "digits.py", "diloco.py", "hsdp.py", "join.py", "transformer.py"])
def test_an_example_goes_on_from_its_checkpoint_as_if_never_interrupted(example: str, printed: dict[str, str]) -> None:
    whole, stopped, resumed = (_losses(printed[f"{example}{run}"]) for run in ("", ", stopped", ", resumed"))
    assert len(whole) >= 3 and stopped and resumed
    assert stopped + resumed == whole
    assert whole[0] != whole[-1]


def test_diloco_says_what_it_saves(printed: dict[str, str]) -> None:
    assert re.search(r"^DiLoCo, 8 bits: \S+ kB a step", printed["diloco.py"], re.MULTILINE)


@pytest.mark.parametrize("example", sorted({run.partition(" ")[0] for run in RUNS.values()}))
def test_every_example_explains_its_options(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [example, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    shown = capsys.readouterr().out
    assert f"torchrun --nproc-per-node {4 if example == 'hsdp.py' else 2} examples/{example}" in shown
    assert "--checkpoint CHECKPOINT" in shown


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With ranks that are forked in the place of torchrun's."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return SimpleNamespace(stdout=_on_two_ranks(command[5:])[0], returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec("\n".join(cells), {"__name__": "notebook"})
    shown = capsys.readouterr().out
    assert shown.count("the same in every bit: True") == 2
    first, then = re.findall(r"steps (\d+) to \d+: loss (\S+)", shown)
    assert (first[0], then[0]) == ("0", "5") and float(then[1]) < float(first[1])
    assert {path.name for path in tmp_path.rglob("*.json")} == {"plain.json", "in backward.json"}


def test_the_jobs_are_well_formed() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "jobs" / "slurm.sh"], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", EXAMPLES / "jobs" / "slurm.sh"], check=True)


def test_a_kubernetes_job_starts_as_many_pods_as_torchrun_waits_for() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "jobs" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert f"--nnodes={job['spec']['parallelism']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29500" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / next(word for word in command if word.endswith(".py"))).exists()


def test_every_example_is_run_here() -> None:
    run = {arguments.partition(" ")[0] for arguments in RUNS.values()}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "train.py",
        "gpt.py",
        "torchft_ddp.py",
        *run,
    }  # The model of two; and one that runs in tests/integrations.
