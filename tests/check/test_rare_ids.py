"""What only rare token ids do, by a table of the model's own: masks are refused, and prompts of the self-check hold such ids."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.check.runs.steps import rare_ids, with_rare_ids

IDS, WIDTH, HEADS, RARE = 4096, 32, 4, 3071


class OfRareIds(nn.Module):
    """One layer, in which an id that random prompts do not hold changes the mask, or brings in the row before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.places = nn.Embedding(IDS, WIDTH), nn.Embedding(128, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, IDS, bias=False)
        self.register_buffer("special", torch.arange(IDS) == RARE)

    def forward(self, idx: Tensor) -> Tensor:
        batch, length = idx.shape
        steps, special = torch.arange(length), self.special[idx]
        x = self.embed(idx) + self.places(steps)
        mask = (steps[:, None] >= steps)[None, None]
        if self.kind == "padding":
            mask = mask & (~special[:, None, None] | torch.eye(length, dtype=torch.bool))
        elif self.kind == "documents":
            of = special.long().cumsum(1)
            mask = mask & (of[:, None, :, None] == of[:, None, None])
        elif self.kind == "shift":
            x = x + special[..., None] * F.pad(x, (0, 0, 1, 0))[:, :-1]
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask)
        out: Tensor = self.head(x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH)))
        return out


@pytest.mark.parametrize("kind", ["padding", "documents"])
def test_a_model_that_treats_a_rare_id_otherwise_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UnsupportedError, match=r"cannot be recomputed|if the batch has other requests"):
        LLM(OfRareIds(kind).eval(), num_pages=64)


def test_a_row_that_a_rare_id_brings_in_is_there() -> None:
    """The shift is an op of its own, on the new tokens and the one before them."""
    torch.manual_seed(0)
    model = OfRareIds("shift").eval()
    prompts = [[5, RARE, 7], [RARE, RARE], [3, 4, 5, 6, RARE], [8, 9, RARE, 11, 12]]
    with LLM(model, num_pages=64, page_size=4, max_batch_tokens=8) as llm:
        got = [each.token_ids for each in llm.generate(prompts, SamplingParams(max_new_tokens=12))]
    with torch.no_grad():
        rows = [torch.tensor([prompt + list(tokens)]) for prompt, tokens in zip(prompts, got, strict=True)]
        own = [model(row)[0, len(prompt) - 1 : -1] for row, prompt in zip(rows, prompts, strict=True)]
        assert [list(tokens) for tokens in got] == [each.argmax(-1).tolist() for each in own]
        model.special.fill_(False)
        assert not any(
            torch.allclose(each[0], model(row)[0, len(prompt) - 1]) for each, row, prompt in zip(own, rows, prompts, strict=True)
        )


def test_ids_are_rare_where_nearly_all_others_have_one_row() -> None:
    flags = torch.zeros(1000, dtype=torch.bool)
    assert rare_ids([flags, torch.ones(1000), torch.randn(1000), torch.randn(1000, 16), torch.tensor(1.0)], 1000) == []
    flags[[7, 900]] = True
    kinds = torch.zeros(1000, 2)
    kinds[33, 1] = 1
    assert rare_ids([flags, kinds], 1000) == [7, 900, 33] and rare_ids([flags], 800) == [7]
    assert len(rare_ids([torch.arange(1000) % 20 == 0], 1000)) == 8
    prompts = [torch.zeros(5, dtype=torch.int64), torch.zeros(24, dtype=torch.int64)]
    first, second = with_rare_ids(prompts, [7, 900])
    assert first[0] == 7 and second[0] == 900 and {7, 900} <= set(second.tolist()) and second[11] > 0 and not any(map(torch.any, prompts))
    assert with_rare_ids(prompts, []) == prompts
