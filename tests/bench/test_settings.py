"""Options are checked before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap.bench.settings import RunConfig, Settings, SettingsError


def test_a_run_config_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    settings = Settings(variants=("ddp-sgd",), bandwidth="1gbit")
    config = RunConfig(settings=settings, variants=("ddp-sgd",), folder=str(tmp_path), link="loopback", deadline=1.5)
    assert RunConfig.load(config.save()) == config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "vgg"}, "model='vgg' is not one of resnet18, resnet50, transformer, mlp, mlp-batchnorm"),
        ({"ranks": 1}, "ranks=1 is too small: at least 2"),
        ({"warmup_steps": 1}, "warmup_steps=1 is too small: at least 3"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb=0.0"),
        ({"bandwidth": "1 parsec"}, "bandwidth='1 parsec' is not a speed"),
        ({"plot": "/nowhere/a.png"}, "plot='/nowhere/a.png' lies in a folder that does not exist"),
    ],
)
def test_bad_settings_name_field_and_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings(**options)
