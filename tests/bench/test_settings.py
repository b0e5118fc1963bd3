"""Options are checked before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap.bench.settings import RunConfig, Settings
from overlap.errors import ConfigurationError


def test_a_run_config_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    settings = Settings(variants=("ddp-sgd",), bandwidth="1gbit")
    config = RunConfig(settings=settings, variants=("ddp-sgd",), folder=str(tmp_path), link="loopback", deadline=1.5)
    assert RunConfig.load(config.save()) == config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "vgg"}, "model='vgg' is not one of resnet18, resnet50, transformer, gpt-350m, mlp"),
        ({"ranks": 1}, "ranks=1 is too small: at least 2"),
        ({"warmup_steps": 1}, "warmup_steps=1 is too small: at least 3"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb=0.0"),
        ({"bandwidth": "1 parsec"}, "bandwidth='1 parsec' is not a speed"),
        ({"bandwidth": "0gbit"}, "bandwidth='0gbit' is not a speed"),
        ({"latency_us": -1.0}, "latency_us=-1.0 must not be negative"),
        ({"plot": "/nowhere/a.png"}, "plot='/nowhere/a.png' lies in a folder that does not exist"),
    ],
)
def test_bad_settings_name_field_and_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Settings(**options)
