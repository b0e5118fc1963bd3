"""The model and the text of transformer.py and hsdp.py: a small GPT that learns a file byte by byte."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

DOCUMENTATION = importlib.util.find_spec("pydoc_data.topics").origin  # Python's own


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
        """Scores of the next byte, ``(batch * context, 256)``."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.bytes(x) + self.places(places)).flatten(0, 1))


class Text:
    """Batches of a file, each of other parts of it at each step and rank."""

    def __init__(self, path: str, *, batch: int, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
        self.batch, self.context = batch, context

    def at(self, step: int) -> torch.Tensor:
        """``batch`` sequences of ``context + 1`` bytes."""
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(self.bytes) - self.context, (self.batch,), generator=generator).tolist()
        return torch.stack([self.bytes[start : start + self.context + 1] for start in starts]).long()
