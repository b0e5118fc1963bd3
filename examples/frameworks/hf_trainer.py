"""The HF Trainer with a chain: torchrun --nproc-per-node 2 examples/frameworks/hf_trainer.py"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from overlap import AllReduce, ClipGradNorm, Step, chain
from overlap.integrations.transformers import OverlapTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain", action="store_true", help="without overlap: it learns the same")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--output-dir", help="for checkpoints, after every epoch")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output-dir")
options = parser.parse_args()

args = TrainingArguments(
    options.output_dir or tempfile.mkdtemp(),
    num_train_epochs=options.epochs,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    max_grad_norm=1.0 if options.plain else 0,  # The chain clips.
    save_strategy="epoch" if options.output_dir else "no",
    use_cpu=not torch.cuda.is_available(),
    ddp_backend=None if torch.cuda.is_available() else "gloo",
    ddp_find_unused_parameters=False,
    report_to=[],
)
torch.manual_seed(0)
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=3, **small))
tokens, labels = torch.randint(64, (48, 12)), torch.randint(3, (48,))
data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
if options.plain:
    trainer = Trainer(model, args, train_dataset=data)
else:
    trainer = OverlapTrainer(
        model,
        args,
        train_dataset=data,
        chain=lambda optimizer: chain(AllReduce(), ClipGradNorm(1.0), Step(optimizer)),
    )
trained = trainer.train(resume_from_checkpoint=options.resume or None)
total = sum(parameter.double().abs().sum() for parameter in model.parameters()).item()
print(f"rank {args.process_index}: loss {trained.training_loss:.9f}, weights {total:.12f}", flush=True)
