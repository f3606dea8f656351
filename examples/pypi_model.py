"""A model from another package: x-transformers' TransformerWrapper, whose attention is its own softmax over einsums, paged token for token.

`pip install '.[examples]'`. Three layouts: a Llama-like one; GPT-OSS's learned sinks with Gemma 2's soft clamp; and flash (SDPA).
The wrapper `Tokens` is needed as TransformerWrapper.forward has **kwargs that accept no position_ids: the engine would offer them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, attention_layers, forward_context

VOCAB, NEW_TOKENS = 96, 12
ROTARY = {"rotary_pos_emb": True, "rotary_emb_dim": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "rotary, one KV head, SwiGLU": {**ROTARY, "attn_one_kv_head": True, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "learned sinks, soft clamp": {"attn_head_learned_sink": True, "attn_softclamp_logits": True, "attn_logit_softclamp_value": 2.0},
    "flash, query and key norms": {**ROTARY, "attn_flash": True, "attn_qk_norm": True},
}


class Tokens(nn.Module):
    """forward(idx) -> logits [1, T, vocabulary]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, idx: Tensor) -> Tensor:
        return self.net(idx)


def build(**layout: Any) -> nn.Module:
    torch.manual_seed(0)
    decoder = Decoder(dim=64, depth=2, heads=4, attn_dim_head=32, **layout)
    model = Tokens(TransformerWrapper(num_tokens=VOCAB, max_seq_len=128, attn_layers=decoder)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sink"):
            nn.init.normal_(parameter)  # they start at zero, all alike
    return model


def greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def first_tokens(model: nn.Module, prompts: list[list[int]]) -> list[int]:
    """The same through torch.compile: one ragged prefill."""
    compiled = torch.compile(model, backend="paged_attn")
    pool = KVPool(attention_layers(compiled), num_pages=16, page_size=16, dtype=torch.float32)
    print("layer 0:", pool.layers[0].describe())
    batch = Batch.build([BatchRequest(p, range(1 + 3 * i, 4 + 3 * i)) for i, p in enumerate(prompts)], page_size=16)
    with forward_context(batch, pool):
        return compiled(batch.model_inputs()["input_ids"])[0, batch.logits_rows[: batch.num_logits]].argmax(-1).tolist()


@torch.no_grad()
def main() -> dict[str, list[list[int]]]:
    found = {}
    prompts = [torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (1, 5, 17, 40)]
    for name, layout in LAYOUTS.items():
        model = build(**layout)
        expected = [greedy(model, prompt) for prompt in prompts]
        with LLM(model) as llm:
            found[name] = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS))]
        assert found[name] == expected, name
        assert first_tokens(model, prompts) == [tokens[0] for tokens in expected], name
        assert len({token for tokens in expected for token in tokens}) > 10, "a model that repeats itself would show little"
        print(f"x-transformers, {name}: {NEW_TOKENS * len(prompts)} tokens equal to its own loop")
    return found


if __name__ == "__main__":
    main()
