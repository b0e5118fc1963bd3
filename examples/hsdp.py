"""A small GPT sharded over 2 ranks and compressed between 2 replicas: torchrun --nproc-per-node 4 examples/hsdp.py"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import DOCUMENTATION, GPT, Text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import overlap
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize

REDUCERS = {
    "AllReduce": AllReduce(),  # what FSDP does by itself
    "bf16": Cast(torch.bfloat16),
    "Int8": Quantize(Int8()),
    "Int4": Quantize(Int4(), error_feedback=True),
    "PowerSGD": PowerSGD(rank=4),
}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--text", default=DOCUMENTATION, help="a file to learn, byte by byte")
parser.add_argument("--reducer", choices=["plain", *REDUCERS], default="Int4", help="between replicas; plain: none")
parser.add_argument("--shards", type=int, default=2, help="ranks that a replica is sharded over")
parser.add_argument("--steps", type=int, default=20, help="training steps")
parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
parser.add_argument("--context", type=int, default=64, help="bytes in a sequence")
parser.add_argument("--width", type=int, default=96, help="of the model; a multiple of 32")
parser.add_argument("--layers", type=int, default=3, help="blocks of the model")
parser.add_argument("--seed", type=int, default=0, help="of the weights")
parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
parser.add_argument("--save-every", type=int, default=10, help="steps between two saves")
options = parser.parse_args()

dist.init_process_group("gloo")  # or "nccl", with a mesh of "cuda"
shape = (dist.get_world_size() // options.shards, options.shards)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
torch.manual_seed(options.seed)
model = GPT(options.width, options.layers, options.context)
for module in [*model.blocks, model]:
    fully_shard(module, mesh=mesh)
registration = None if options.reducer == "plain" else overlap.register(model, REDUCERS[options.reducer])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = Text(options.text, batch=options.batch, context=options.context)
first_step = 0
whole = sorted(options.checkpoint.glob("*/.metadata")) if options.checkpoint else []  # this file is written last
if whole:
    reader = dcp.FileSystemReader(whole[-1].parent)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if registration is not None:
        state["overlap"] = registration.state_dict(reader.read_metadata())
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if registration is not None:
        registration.load_state_dict(state["overlap"])
    first_step = int(whole[-1].parent.name)

for step in range(first_step, options.steps):
    batch = text.at(step)
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    loss.backward()  # reduce-scatters each block's gradients in a replica, then reduces shards between replicas
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"rank 0: loss {loss.item():.6f} at step {step}", flush=True)
    if options.checkpoint and (step + 1) % options.save_every == 0:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        if registration is not None:
            state["overlap"] = registration.state_dict()
        dcp.save(state, checkpoint_id=options.checkpoint / f"{step + 1:06}")
dist.destroy_process_group()
