"""What is installed: `overlap` alone, which gets along with whatever a training script has beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import overlap
from overlap.cli import COMMANDS

ROOT = Path(__file__).parent.parent
NEIGHBOURS = ("hooks", "join", "optim")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_all_of_overlap_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"overlap", f"ddp_overlap-{overlap.__version__}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "overlap").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert {f"{module.replace('.', '/')}.py" for module, _ in COMMANDS.values()} <= set(names)
    assert "overlap/py.typed" in names


def test_a_folder_with_modules_of_the_same_names_keeps_its_own(wheel: Path, tmp_path: Path) -> None:
    installed, project = tmp_path / "installed", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(installed)
    project.mkdir()
    for name in NEIGHBOURS:
        (project / f"{name}.py").write_text(f"mine = {name!r}\n")
    script = project / "train.py"
    script.write_text(
        "import overlap, overlap.hooks, overlap.join, overlap.optim\n"
        "import hooks, join, optim\n"
        "print(overlap.__file__, hooks.mine, join.mine, optim.mine)\n"
    )
    # Not measured: these are copies of the modules, which a coverage report could not find.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment["PYTHONPATH"] = str(installed)
    shown = subprocess.run(
        [sys.executable, script], cwd=project, env=environment, check=True, capture_output=True, text=True
    )
    assert shown.stdout.split() == [str(installed / "overlap" / "__init__.py"), *NEIGHBOURS]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_links_at_the_root_are_relative(name: str) -> None:
    assert (ROOT / name).readlink() == Path("overlap") / name
