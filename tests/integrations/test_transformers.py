"""The HF Trainer with a chain, beside the Trainer without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import prepare_rank, state_of
from features import FRAMEWORKS
from forms import options_of
from playing import check_row
from torch import nn
from transformers import TrainerCallback

from harness import run_ranks
from overlap import AllReduce, DivideByCount, Step, ZeroRedundancyOptimizer, chain

SAVED_AFTER = 3


def _model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=3, **small))


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (28, 12), generator=generator)
    labels = torch.randint(3, (28,), generator=generator)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class _Losses:
    """Makes a Trainer keep the loss of every batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.clone())
        return loss


def _trainer(form: str, folder: str, *, is_resumed: bool = False, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from overlap.integrations.transformers import OverlapMixin

    arguments = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0,
        "ddp_find_unused_parameters": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    arguments = {name: value for name, value in arguments.items() if value != "default"}
    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", ddp_bucket_cap_mb=1, **arguments)
    assert args.world_size == 2
    model, data = _model(), _data()
    if form == "plain":
        return type("PlainTrainer", (_Losses, Trainer), {})(model, args, train_dataset=data, eval_dataset=data[:8])
    options = options_of(form, is_resumed=is_resumed)
    if form.startswith("zero"):
        kind, of_kind = Trainer.get_optimizer_cls_and_kwargs(args)
        options["optimizer_cls_and_kwargs"] = ZeroRedundancyOptimizer, {"optimizer_class": kind, **of_kind}
    cls = type("OursTrainer", (_Losses, OverlapMixin, Trainer), {})
    return cls(model, args, train_dataset=data, eval_dataset=data[:8], **options)


def _left(trainer: Any) -> dict[str, Any]:
    return {**state_of(trainer.model, trainer.optimizer), "losses": trainer.losses}


def _play(feature: str, form: str, folder: str) -> Any:
    folder = f"{folder}/{form}"
    if "plain Trainer" in feature:
        return _resumed_across(form, folder, is_saved_by_plain=feature.startswith("a checkpoint of the plain"))
    if "resumed" in feature:
        return _resumed(form, folder)
    options: dict[str, Any] = {}
    if feature == "`max_grad_norm`":
        options["max_grad_norm"] = 0.05
    elif feature.endswith("as by default"):
        options |= {"max_grad_norm": "default", "ddp_find_unused_parameters": "default"}
    elif feature == "`gradient_accumulation_steps=3`":
        options["gradient_accumulation_steps"] = 3
    elif feature.startswith("evaluation"):
        options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        options |= {"load_best_model_at_end": True}
    trainer = _trainer(form, folder, **options)
    if feature == "`train()` after one that failed":
        trainer.add_callback(_FailsOnce())
        with pytest.raises(FloatingPointError):
            trainer.train()
    trainer.train()
    return _left(trainer)


class _FailsOnce(TrainerCallback):
    """Raises at the end of the second step, the first time."""

    has_failed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and not self.has_failed:
            self.has_failed = True
            raise FloatingPointError


def _resumed_across(form: str, folder: str, *, is_saved_by_plain: bool) -> Any:
    saving = {"save_strategy": "steps", "save_steps": SAVED_AFTER}
    saved_by, loaded_by = ("plain", form) if is_saved_by_plain else (form, "plain")
    _trainer(saved_by, folder, **saving).train()
    trainer = _trainer(loaded_by, folder, **saving)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AFTER}")
    return _left(trainer)


def _resumed(form: str, folder: str) -> Any:
    saving = {"save_strategy": "steps", "save_steps": SAVED_AFTER, "is_resumed": True}
    trainer = _trainer(form, folder, **saving)
    trainer.train()
    whole = _left(trainer)
    whole["losses"] = whole["losses"][SAVED_AFTER:]
    again = _trainer(form, folder, **saving)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED_AFTER}")
    return _left(again), whole


@pytest.mark.parametrize("feature", FRAMEWORKS["HF Trainer"])
def test_the_trainer_with_a_chain_is_what_the_table_says(feature: str, tmp_path: Path) -> None:
    check_row("HF Trainer", feature, _play, tmp_path)


def _rows() -> list[dict[str, torch.Tensor]]:
    """Texts of different lengths, as long as the longest."""
    generator, rows = torch.Generator().manual_seed(1), []
    for length in range(3, 12):
        tokens = torch.randint(64, (12,), generator=generator)
        rows.append({"input_ids": tokens, "labels": torch.where(torch.arange(12) < length, tokens, -100)})
    return rows * 2


def _counted(rank: int, world_size: int, folder: str) -> None:
    """As docs/integrations.md has it, beside the Trainer's own mean over the tokens of all devices."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from overlap.integrations.transformers import OverlapTrainer

    prepare_rank(rank, world_size)
    by_count = DivideByCount()

    class CountingTrainer(OverlapTrainer):
        def get_batch_samples(self, *args: Any, **options: Any) -> Any:
            batches, tokens = super().get_batch_samples(*args, **options)
            if batches:
                by_count.count(tokens)
            return batches, 1

    def trained(cls: type[Trainer], **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        small = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        dropped = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **small, **dropped))
        args = TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1,
            ddp_find_unused_parameters=False, average_tokens_across_devices=cls is Trainer,
        )  # fmt: skip
        cls(model, args, train_dataset=_rows(), **options).train()
        return [parameter.detach() for parameter in model.parameters()]

    plain = trained(Trainer)
    counted = trained(CountingTrainer, chain=lambda optimizer: chain(by_count, AllReduce(), Step(optimizer)))
    for one, other in zip(plain, counted, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_a_count_of_tokens_is_the_trainers_mean_over_devices(tmp_path: Path) -> None:
    run_ranks(_counted, 2, str(tmp_path), timeout_s=200)
