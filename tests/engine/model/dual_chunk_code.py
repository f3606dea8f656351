"""A Qwen2 with dual chunk attention (An et al., 2024), in plain PyTorch as a file of remote code has it: no cache, masks of all tokens.

`spelling` says how: "masked" chooses among three products and takes one softmax; "merged" takes three softmaxes and merges their outputs by
the log-sum-exps of their scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB, HEADS, KV_HEADS, DIM = 96, 4, 2, 8


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [1, heads, T, dim] rotated by positions [1, T]."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, DIM, 2, device=x.device).float() / DIM)
    angle = (positions[..., None].float() * frequencies)[:, None]
    cos, sin = (torch.cat((each, each), -1).to(x.dtype) for each in (angle.cos(), angle.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class DualChunkAttention(nn.Module):
    """Keys are rotated by their position in the chunk; a query by that, by as much and a chunk more, and by the farthest there is."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        width, sizes = config.hidden_size, config.dual_chunk_attention_config
        self.size, self.original, self.spelling = sizes["chunk_size"], sizes["original_max_position_embeddings"], config.spelling
        self.length = self.size - sizes["local_size"]
        self.q_proj, self.o_proj = nn.Linear(width, HEADS * DIM), nn.Linear(HEADS * DIM, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, KV_HEADS * DIM), nn.Linear(width, KV_HEADS * DIM)

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (project(hidden_states).unflatten(-1, (-1, DIM)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        inside = position_ids % self.length
        sharper = (0.1 * torch.log((position_ids + 1) / self.original) + 1).clamp(min=1)  # for longer contexts
        q = q * sharper[:, None, :, None].to(q.dtype)
        queries = (
            turned(q, inside),
            turned(q, (inside + self.length).clamp(max=self.size)),
            turned(q, torch.full_like(position_ids, self.size)),
        )
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (turned(k, inside), v))
        chunks = position_ids[0] // self.length
        output = getattr(self, self.spelling)(queries, k, v, chunks[:, None] - chunks, position_ids[0][:, None] >= position_ids[0])
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    def masked(self, queries: tuple[Tensor, ...], k: Tensor, v: Tensor, distance: Tensor, seen: Tensor) -> Tensor:
        intra, successive, inter = (query @ k.transpose(2, 3) for query in queries)
        scores = torch.where(distance == 0, intra, torch.where(distance == 1, successive, inter)) / DIM**0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(v.dtype)
        return weights @ v

    def merged(self, queries: tuple[Tensor, ...], k: Tensor, v: Tensor, distance: Tensor, seen: Tensor) -> Tensor:
        outputs, sums = [], []
        for query, visible in zip(queries, (seen & (distance == 0), distance == 1, distance > 1), strict=True):
            scores = (torch.matmul(query, k.transpose(-1, -2)) * DIM**-0.5).masked_fill(~visible, torch.finfo(query.dtype).min)
            outputs.append(scores.softmax(-1) @ v)
            sums.append(scores.logsumexp(-1))
        weights = torch.stack(sums).softmax(0)
        return (torch.stack(outputs) * weights[..., None]).sum(0)


class Qwen2DualChunkForCausalLM(Qwen2ForCausalLM):
    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = DualChunkAttention(config)
        self.post_init()


def made(spelling: str = "masked", chunk: int = 8, local: int = 4, original: int = 16, **changes: Any) -> Qwen2DualChunkForCausalLM:
    """Two layers with random weights of some size; chunks of `chunk` tokens."""
    sizes = {"chunk_size": chunk + local, "local_size": local, "original_max_position_embeddings": original}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS, "head_dim": DIM}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = Qwen2Config(
        vocab_size=VOCAB, num_key_value_heads=KV_HEADS, max_position_embeddings=4096, use_cache=False, tie_word_embeddings=False,
        dual_chunk_attention_config=sizes, spelling=spelling, **shape, **none, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2DualChunkForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(1.0 if parameter.dim() == 1 else 6.0)
    return model
