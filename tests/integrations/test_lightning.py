"""Lightning with a chain, beside Lightning without."""

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from comparing import prepare_rank
from features import FRAMEWORKS
from lightning_runs import loader_of, module_of, play, strategy_of, trainer_of
from playing import check_row

from harness import on_ranks, run_ranks
from overlap import AllReduce, ConfigurationError, Int8, LocalSGD, OverlapError
from overlap.hooks.engine.registration import registration_of


@on_ranks(2)
def test_wrong_options_are_refused_with_what_to_give(rank: int, world_size: int) -> None:
    prepare_rank(rank, world_size)
    for options, said in (
        ({"chain": [Int8()]}, r"Int8\(\) is"),
        ({"chain": AllReduce}, "got the class AllReduce"),
        ({"chain": AllReduce(), "local_sgd": LocalSGD}, "both given"),
        ({"ddp_comm_hook": print}, r"as_stage\(hook, state\)"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            strategy_of("wrong", **options)
    strategy = strategy_of("wrong", chain=lambda optimizer: AllReduce)
    with pytest.raises(ConfigurationError, match=r"lambda optimizer: chain\(AllReduce\(\), Step\(optimizer\)\)"):
        trainer_of("wrong", strategy).fit(module_of("wrong"), loader_of())


FORMS = ("interleaved", "powersgd")


def _save_each(rank: int, world_size: int, folder: str) -> None:
    prepare_rank(rank, world_size)
    for form in FORMS:
        module, trainer = module_of(form), trainer_of(form, max_epochs=1)
        trainer.fit(module, loader_of())
        trainer.save_checkpoint(f"{folder}/{form}.ckpt")


def _resume_each(rank: int, world_size: int, folder: str) -> list[str]:
    prepare_rank(rank, world_size)
    said = []
    for saved, form in (*zip(FORMS, FORMS, strict=True), ("interleaved", "powersgd"), ("powersgd", "interleaved")):
        module, trainer = module_of(form), trainer_of(form)
        try:
            trainer.fit(module, loader_of(), ckpt_path=f"{folder}/{saved}.ckpt")
            said.append(f"trained {len(module.losses)} batches")
        except OverlapError as error:
            said.append("; ".join([str(error), *error.__notes__]))
    return said


def test_a_checkpoint_resumes_with_other_ranks_and_without_memory_with_other_stages(tmp_path: Path) -> None:
    run_ranks(_save_each, 2, str(tmp_path))
    for said in run_ranks(_resume_each, 3, str(tmp_path)):
        *same_chains, to_memory, from_memory = said
        assert set(same_chains) == {to_memory} == {"trained 7 batches"}
        assert "PowerSGD" in from_memory and "delete checkpoint['overlap']" in from_memory
    for file, keys in (("interleaved", "[]"), ("powersgd", "['overlap']")):
        # As in a process where this library is not installed.
        program = (
            "import sys, torch\nsys.modules['overlap'] = None\n"
            "print([key for key in torch.load(sys.argv[1], weights_only=True) if key == 'overlap'])"
        )
        command = [sys.executable, "-c", program, tmp_path / f"{file}.ckpt"]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == keys


def _fail(rank: int, world_size: int, where: str, folder: str) -> list[tuple[bool, list[str], list[str]]]:
    import torch
    from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

    prepare_rank(rank, world_size)
    found = []
    for form in ("interleaved", "powersgd"):
        path = Path(folder) / form

        def stop(trainer: Any, *_: Any, folder: Path = path) -> None:
            if trainer.global_step < 3:
                return
            if where == "a signal of Slurm":
                trainer.save_checkpoint(folder / "hpc_ckpt_1.ckpt")
            raise FloatingPointError("the user's")

        callbacks = [LambdaCallback(on_before_optimizer_step=stop)]
        if where != "a signal of Slurm":
            callbacks.append(OnExceptionCheckpoint(path))
        trainer = trainer_of(form, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            with pytest.raises(FloatingPointError, match="the user's"):
                trainer.fit(module_of(form), loader_of())
        said = [str(one.message) for one in caught if "this checkpoint" in str(one.message)]
        dist.barrier()
        (file,) = path.iterdir()
        saved = torch.load(file, weights_only=True)
        found.append((saved["global_step"] == 3 and bool(saved["optimizer_states"]), said, list(saved)))
    return found


@pytest.mark.parametrize("where", ["before the step", "a signal of Slurm"])
def test_a_checkpoint_of_a_run_that_ends_suddenly_needs_no_other_rank_and_says_what_it_lacks(
    where: str, tmp_path: Path
) -> None:
    for stateless, with_memory in run_ranks(_fail, 2, where, str(tmp_path)):
        for is_whole, _, keys in (stateless, with_memory):
            assert is_whole and "overlap" not in keys
        assert all("without the state of stages" in said[0] for _, said, _ in (stateless, with_memory))


@pytest.mark.parametrize("feature", FRAMEWORKS["Lightning"])
def test_lightning_with_a_chain_is_what_the_table_says(feature: str, tmp_path: Path) -> None:
    check_row("Lightning", feature, play, tmp_path)


def _named(rank: int, world_size: int) -> str:
    prepare_rank(rank, world_size)
    module, shown = module_of("reducer"), []
    trainer = trainer_of("reducer", "overlap", max_epochs=1)
    pickle.loads(pickle.dumps(trainer.strategy))
    module.on_train_start = lambda: shown.append(repr(registration_of(trainer.strategy.model)))
    trainer.fit(module, loader_of(3))
    return shown[0]


def test_the_trainer_takes_the_name() -> None:
    assert run_ranks(_named, 2)[0] == "<chain(AllReduce(), Step(AdamW, interleaved)) registered>"
