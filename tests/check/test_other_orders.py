"""What has as many rows as tokens and in another order, such as tokens sorted by their experts, is compared at no row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_attn import LLM, SamplingParams
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import AS_IT_IS, HowToRun, Original
from paged_attn.check.runs.tapped import Visit
from paged_attn.check.runs.truth import LOGITS, Truth
from tests.zoo.build import build


class Sorting(Original):
    """Doubles each token; `sorted` and `order` are rows in the order of the tokens' values."""

    narrow = torch.float32
    recurrent = ()

    def __init__(self, causal: bool = True) -> None:
        self.causal = causal

    def run(self, prompt: Tensor, visit: Visit, how: HowToRun = AS_IT_IS) -> Tensor:
        values = prompt.float()
        ranked = values.sort()
        visit("doubled", 2 * values)
        visit("sorted", ranked.values)
        visit("order", ranked.indices)
        return values[:, None] if self.causal else ranked.values[:, None]

    def padded_length(self, count: int) -> int:
        return count

    def module_of(self, name: str) -> str:
        return name


@pytest.mark.parametrize(("causal", "left"), [(True, {"doubled", LOGITS}), (False, {"doubled", "sorted", "order", LOGITS})])
def test_rows_of_other_tokens_are_left_out_where_the_logits_stay(causal: bool, left: set[str]) -> None:
    original = Sorting(causal)
    prompts = [torch.tensor([5, 1, 3]), torch.tensor([9, 8, 7, 5, 6, 1, 2, 4, 3])]
    truth = Truth(original, [Boundary(name) for name in ("doubled", "sorted", "order")], prompts)
    assert truth.names == {"doubled", "sorted", "order", LOGITS}
    truth.forget_other_orders(original, 1, 6)
    assert truth.names == left and not {name for name in ("doubled", "sorted", "order") if truth.has_rows(name)} - left


def test_an_attention_of_one_expert_a_token_is_served() -> None:
    model = build("jetmoe", num_experts_per_tok=1)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    with LLM(model, num_pages=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.token_ids == expected[0, len(prompt) :].tolist()
