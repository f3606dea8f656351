"""Not only Hugging Face: a GPT of your own in plain PyTorch (rotary positions, grouped-query attention, one windowed layer), paged.

Nothing of paged_attn or transformers is in the model; what is asked of it is forward(input_ids, position_ids) -> logits [1, T, vocabulary].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, attention_layers, forward_context

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, WINDOW = 96, 64, 8, 2, 16, 8


class Attention(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
        mask = None
        if self.window is not None:
            distance = position_ids[:, :, None] - position_ids[:, None, :]
            mask = ((distance >= 0) & (distance < self.window))[:, None]
        q, k = rotate(q, position_ids), rotate(k, position_ids)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotate(x: Tensor, position_ids: Tensor) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, DIM, 2, device=x.device) / DIM)
    angle = (position_ids[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attentions = nn.ModuleList(Attention(window) for window in (None, WINDOW))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH)) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + 4 * attention(F.rms_norm(x, (WIDTH,)), position_ids)
            x = x + mlp(F.rms_norm(x, (WIDTH,)))
        return self.head(F.rms_norm(x, (WIDTH,)))


@torch.no_grad()
def main() -> list[list[int]]:
    torch.manual_seed(0)
    model = GPT().eval()
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (1, 5, 17, 40)]
    expected = [list(prompt) for prompt in prompts]
    for ids in expected:  # the model's own greedy loop, one prompt at a time
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    with LLM(model) as llm:
        tokens = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=12))]
    assert [prompt + new for prompt, new in zip(prompts, tokens, strict=True)] == expected
    compiled = torch.compile(model, backend="paged_attn")
    pool = KVPool(attention_layers(compiled), num_pages=16, page_size=16, dtype=torch.float32)
    batch = Batch.build([BatchRequest(p, range(1 + 3 * i, 4 + 3 * i)) for i, p in enumerate(prompts)], page_size=16)
    with forward_context(batch, pool):
        inputs = batch.model_inputs()  # with use_cache=False, which only models of transformers take
        logits = compiled(inputs["input_ids"], inputs["position_ids"])[0, batch.logits_rows[: batch.num_logits]]
    assert logits.argmax(-1).tolist() == [new[0] for new in tokens]
    print(f"plain GPT ({'; '.join(spec.describe() for spec in pool.layers)}): {sum(map(len, tokens))} tokens equal to its own loop")
    return tokens


if __name__ == "__main__":
    main()
