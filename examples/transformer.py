"""A small GPT with Muon for its matrices and AdamW for the rest: torchrun --nproc-per-node 2 examples/transformer.py"""

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
documentation = importlib.util.find_spec("pydoc_data.topics").origin  # Python's own
parser.add_argument("--text", default=documentation, help="a file to learn, byte by byte")
parser.add_argument(
    "--update",
    choices=["sharded", "overlapped", "plain"],
    default="sharded",
    help="sharded: each rank keeps and updates a part, in backward; overlapped: each rank updates all, in backward; "
    "plain: DistributedDataParallel alone. All three learn the same",
)
parser.add_argument("--steps", type=int, default=20, help="training steps")
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
parser.add_argument("--width", type=int, default=96, help="of the model; a multiple of 32")
parser.add_argument("--layers", type=int, default=3, help="blocks of the model")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
parser.add_argument("--save-every", type=int, default=10, help="steps between two saves")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, 32)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.bytes(x) + self.places(places)))


dist.init_process_group("gloo")  # or "nccl", with the model and its inputs on a GPU
torch.manual_seed(0)
ddp = DistributedDataParallel(
    GPT(options.width, options.layers, options.context), bucket_cap_mb=0.25, gradient_as_bucket_view=True
)

# Muon is for the matrices inside; embeddings, the head and all vectors are AdamW's.
matrices = [p for p in ddp.module.blocks.parameters() if p.ndim == 2]
others = [p for p in ddp.parameters() if all(p is not matrix for matrix in matrices)]
if options.update == "sharded":
    muon = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.02)
    adamw = ZeroRedundancyOptimizer(others, torch.optim.AdamW, lr=3e-3)
    chain(ZeroStep(muon, release_gradients=True), ZeroStep(adamw, release_gradients=True)).register(ddp)
else:
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)
if options.update == "overlapped":
    muon, adamw = OverlappedOptimizer(muon), OverlappedOptimizer(adamw)
    updates = (Step(one, release_gradients=True) for one in (muon, adamw))
    chain(AllReduce(), *updates).register(ddp)
schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in (muon, adamw)]

text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8)
first_step = 0
added = {"muon": schedulers[0], "adamw": schedulers[1]}
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    overlap.load(whole[-1].parent, ddp, [muon, adamw], **added)
    first_step = int(whole[-1].parent.name)

for step in range(first_step, options.steps):
    # Every rank reads other parts of the text.
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator).tolist()
    batch = torch.stack([text[start : start + options.context + 1] for start in starts]).long()
    for one in (muon, adamw):
        one.zero_grad()  # plain DDP needs it; a registered chain clears gradients by itself
    loss = cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()  # reduces each bucket, updates its parameters, and gives the memory of its gradients back
    for one in (muon, adamw, *schedulers):
        one.step()
    if dist.get_rank() == 0:
        print(f"rank 0: loss {loss.item():.6f} at step {step}", flush=True)
    if options.checkpoint and (step + 1) % options.save_every == 0:
        overlap.save(options.checkpoint / f"{step + 1:06}", ddp, [muon, adamw], **added)
dist.destroy_process_group()
