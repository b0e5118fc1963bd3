"""docs/reports/integrations.md shows what the tests play; a missing package is named with its extra. Needs none."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from features import FRAMEWORKS, table

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reports" / "integrations.md").read_text()


def test_the_page_shows_the_tables_that_are_played() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and line.count("|") > 4]
    declared = "\n".join(map(table, FRAMEWORKS)).splitlines()
    assert rows == declared


def test_a_package_that_is_missing_is_named_with_its_extra() -> None:
    needed = ("lightning", "accelerate", "transformers", "torchft")
    # As where none is installed, also where they are.
    program = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({needed}))\n"
        f"for extra in {needed}:\n"
        "    try: importlib.import_module(f'overlap.integrations.{extra}')\n"
        "    except ImportError as error: print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, said in zip(needed, shown.stdout.splitlines(), strict=True):
        assert f"pip install '.[{extra}]'" in said
        assert any(re.match(rf"{extra}\b", package) for package in extras[extra])


def test_importing_the_integrations_imports_no_framework() -> None:
    program = (
        "import sys, overlap.integrations\n"
        "needed = ('lightning', 'accelerate', 'transformers', 'torchft', 'torch')\n"
        "print([name for name in needed if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
