"""A GPT as in Radford et al. (2019): a causal Transformer whose head is its embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["GPT", "GPT_350M", "GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Its size. No dropout: every variant takes the same path through the same numbers."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    """A multiple of 64, for the matrix units."""
    tokens: int
    """In a sequence."""


# 355 M parameters, "GPT-2 medium".
GPT_350M = GPTConfig(layers=24, width=1024, heads=16, vocabulary=50304, tokens=1024)


class GPT(nn.Module):
    """Tokens of shape ``(n, config.tokens)`` to logits of shape ``(n * config.tokens, config.vocabulary)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.blocks = nn.Sequential(*(_Block(config.width, config.heads) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embed(tokens) + self.position))
        return nn.functional.linear(hidden, self.embed.weight).flatten(0, 1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, width = hidden.shape
        heads = self.attention(self.attention_norm(hidden)).view(batch, tokens, 3, self._heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.feed_forward(hidden)  # type: ignore[no-any-return]
