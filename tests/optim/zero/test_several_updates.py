"""Several updates in one chain, each of its own parameters, beside the same optimizers on plain DDP."""

from __future__ import annotations

import torch
from several_loops import FORMS, check, plain_pair, plain_run, several_run

from harness import bucket_calls, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, ClipGradNorm, ReduceScatter, SkipNonFinite, Step, ZeroStep, chain


def _parity(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank)
    for name, form in FORMS.items():
        with bucket_calls(Step) as steps, bucket_calls(ZeroStep) as zeros, bucket_calls(ReduceScatter) as reductions:
            candidate = several_run(MLP, rank, form)
        check(candidate, reference, what=name, rank=rank)
        assert len(steps) + len(zeros) > 20, name
        assert bool(reductions) == (name.startswith(("both sharded", "sharded")) and "reducer" not in name), name


def test_two_optimizers_equal_the_same_two_on_plain_ddp() -> None:
    run_ranks(_parity, 2)


def _transformed(rank: int, world_size: int) -> None:
    for name in ("the first deferred", "both sharded, one deferred", "sharded beside whole", "sharded, one automatic"):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, pair, clip = plain_pair(plain), FORMS[name].pair(ddp), ClipGradNorm(0.05)
        reducer = [AllReduce()] if name == "the first deferred" else []
        updates = [stage for stage in FORMS[name].stages(*pair) if isinstance(stage, (Step, ZeroStep))]
        chain(*reducer, SkipNonFinite(), clip, *updates).register(ddp)
        steps = [one for one, update in zip(pair, updates, strict=True) if not update.form.is_automatic]
        for place in range(5):
            plain.zero_grad()
            for model, optimizers in ((plain, reference), (ddp, steps)):
                if is_broken := (place == 2 and rank == 1):
                    handle = model.module[4].bias.register_hook(lambda grad: grad * float("nan"))
                mean_squared_error(model, MLP.batch(place, rank)).backward()
                if is_broken:
                    handle.remove()
                if model is plain:
                    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                if model is ddp or place != 2:
                    for optimizer in optimizers:
                        optimizer.step()
            if place != 2:
                torch.testing.assert_close(clip.norm, norm, msg=lambda text, name=name: f"{name}: {text}")
                assert float(norm) > 0.05
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                # Ranks sum their parts of the norm in float64, and Muon works in bfloat16.
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_transforms_before_several_updates_see_the_mean_of_all() -> None:
    run_ranks(_transformed, 2)
