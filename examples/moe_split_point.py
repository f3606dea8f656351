"""An op of your own as a split point: experts that sort and count their tokens on the host, between the captured pieces of the model.

A CUDA graph can hold no such op. `register_split_op` makes graphs stop there, as at attention; so does its tag `cudagraph_unsafe`.
Here one op returns its result and the other writes it into an argument. Each must compute every token by itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, register_split_op

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, EXPERTS, CHOSEN = 96, 64, 8, 2, 16, 6, 2


@torch.library.custom_op("moe_example::experts", mutates_args=())
def experts(x: Tensor, weight: Tensor, choice: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [T, WIDTH], weight and choice [T, CHOSEN], up [EXPERTS, WIDTH, inner], down [EXPERTS, inner, WIDTH] -> [T, WIDTH]."""
    order, out = choice.flatten().argsort(stable=True), torch.zeros_like(x)
    counts = choice.flatten().bincount(minlength=len(up)).tolist()  # waits for the device
    for expert, chosen in enumerate(order.split(counts)):
        rows = chosen // choice.shape[1]
        out.index_add_(0, rows, F.silu(x[rows] @ up[expert]) @ down[expert] * weight.flatten()[chosen, None])
    return out


@experts.register_fake
def _(x: Tensor, weight: Tensor, choice: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("moe_example::experts_into", mutates_args=("out",), tags=(torch.Tag.cudagraph_unsafe,))
def experts_into(x: Tensor, weight: Tensor, choice: Tensor, up: Tensor, down: Tensor, out: Tensor) -> None:
    out.copy_(experts(x, weight, choice, up, down))


register_split_op(torch.ops.moe_example.experts.default)


class Layer(nn.Module):
    def __init__(self, into: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), nn.Linear(HEADS * DIM, WIDTH)
        self.router, self.into = nn.Linear(WIDTH, EXPERTS), into
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 96) / 8), nn.Parameter(torch.randn(EXPERTS, 96, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (-1, DIM)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + 4 * self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))
        tokens, result = F.rms_norm(x, (WIDTH,))[0], torch.empty_like(x[0])
        weight, choice = (4 * self.router(tokens)).softmax(-1).topk(CHOSEN)
        if not self.into:
            return x + experts(tokens, weight, choice, self.up, self.down)
        experts_into(tokens, weight, choice, self.up, self.down, result)
        return x + result


class MoE(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCAB, WIDTH), *(Layer(into) for into in (False, True, False, True)), nn.Linear(WIDTH, VOCAB))


@torch.no_grad()
def main() -> list[list[int]]:
    torch.manual_seed(0)
    model = MoE().eval().to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length in (1, 5, 17, 40)]
    expected = [list(prompt) for prompt in prompts]
    for ids in expected:  # the model's own greedy loop, one prompt at a time
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids], device=model[0].weight.device))[0, -1].argmax()))
    tokens = [c.token_ids for c in LLM(model).generate(prompts, SamplingParams(max_new_tokens=12))]
    assert [prompt + new for prompt, new in zip(prompts, tokens, strict=True)] == expected
    assert len({token for new in tokens for token in new}) > 10, "a model that repeats itself would show little"
    print(f"MoE, split at attentions and at ops of its own: {sum(map(len, tokens))} tokens equal to its own loop")
    return tokens


if __name__ == "__main__":
    main()
