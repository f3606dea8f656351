"""A nanoGPT as people write it, served as it is: masked softmax over a tril buffer, learned positions, logits of the last token alone.

Its forward counts the positions, which become each request's own, and gives the logits of all tokens when it is called with targets.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams

VOCAB, BLOCK, WIDTH, HEADS, LAYERS = 96, 256, 48, 4, 2


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = self.resid_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (each.view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in self.c_attn(x).split(WIDTH, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        y = (self.attn_dropout(att) @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), CausalSelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH), nn.Dropout(0.1)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # less work where only the next token is wanted
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@torch.no_grad()
def main() -> list[list[int]]:
    torch.manual_seed(0)
    model = GPT().eval()
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (1, 7, 20, BLOCK - 12)]
    expected = [list(prompt) for prompt in prompts]
    for ids in expected:  # the model's own greedy loop, one prompt at a time
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    with LLM(model) as llm:
        tokens = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=12))]
    assert [prompt + new for prompt, new in zip(prompts, tokens, strict=True)] == expected
    assert len({token for new in tokens for token in new}) > 10, "a model that repeats itself would show little"
    print(f"nanoGPT, unmodified: {len(prompts)} prompts of 1 to {BLOCK - 12} tokens, {sum(map(len, tokens))} tokens equal to its own loop")
    return tokens


if __name__ == "__main__":
    main()
