"""A choice for GPUs, without one."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from overlap.hooks.post_local_sgd import own_subgroup


def test_groups_of_the_librarys_own_get_streams_of_high_priority_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(return_value=("the group", []))
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", asked)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    for backends, is_high in (("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
        own_subgroup([[0]], mock.Mock(), timeout=timedelta(seconds=7))
        options = asked.call_args.kwargs["pg_options"]
        assert options == (
            SimpleNamespace(is_high_priority_stream=True, _timeout=timedelta(seconds=7)) if is_high else None
        )
