"""Tests with the real frameworks: they are collected where those are installed, see ``make test-integrations``."""

import importlib.util
import os
from pathlib import Path

NEEDS = {
    "test_lightning": "lightning",
    "test_accelerate": "accelerate",
    "test_transformers": "transformers",
    "test_ray_example": "ray",
    "test_loop_examples": "ignite",
    "test_optimizers": "pytorch_optimizer",
    "test_torchft": "torchft",
}


# Each takes seconds to import: once, in the process that ranks are forked from.
os.environ["OVERLAP_TESTS_PRELOAD"] = (
    "lightning.pytorch accelerate transformers.trainer transformers.models.bert.modeling_bert "
    "transformers.models.gpt2.modeling_gpt2 overlap.integrations.lightning overlap.integrations.transformers torchft"
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether the framework that a module of tests needs is missing; ``None`` leaves it to others."""
    for prefix, package in NEEDS.items():
        if collection_path.name.startswith(prefix) and importlib.util.find_spec(package) is None:
            return True
    return None
