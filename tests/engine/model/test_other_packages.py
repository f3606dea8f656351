"""Models of other packages: adapters of peft, layouts of x-transformers, litgpt's window. Served token for token, or refused for
the reason that is true, with advice only where it helps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.engine.runners.own_positions import POSITIONS, Decoder, greedy_loop
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

PROMPTS = random_prompts((1, 5, 17, 33))
GREEDY = SamplingParams(max_new_tokens=8)


def assert_serves(model: nn.Module, expected: list[list[int]], **settings: Any) -> None:
    for page_size in (1, 16):
        with LLM(model, page_size=page_size, num_pages=200, max_batch_tokens=16, **settings) as llm:
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected, f"page size {page_size}"


def adapted(name: str, kind: Callable[[Any], Any]) -> nn.Module:
    """A tiny model under an adapter whose weights are not those that it starts with, which change nothing."""
    peft = pytest.importorskip("peft")
    model: nn.Module = peft.get_peft_model(build(name, tie_word_embeddings=False), kind(peft))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) * 0.3
    return model.eval()


def lora(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM", **more)


def own_tokens(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        found.append(output[0, -8:].tolist())
    return found


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_adapter_over_a_model_with_windows(name: str, compiled: bool) -> None:
    """The wrapper reaches its parts otherwise than plain modules do, and what the config says of a layer is said of its path."""
    model = adapted(name, lora)
    expected = own_tokens(model)
    assert expected != [greedy(build(name, tie_word_embeddings=False), prompt, 8) for prompt in PROMPTS]
    assert_serves(model, expected, compile=compiled)


def test_who_can_not_be_traced_is_sent_where_it_runs() -> None:
    model = adapted("qwen3", lambda peft: lora(peft, use_dora=True))
    with pytest.raises(UnsupportedError, match=r"LLM\(model, compile=False\), which traces nothing, may serve it"):
        LLM(model, num_pages=20)
    assert_serves(model, own_tokens(model), compile=False)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("PromptTuningConfig", r"logits of shape \[1, 9, 96\] for token ids \[1, 5\]: it puts 4 rows of its own among the tokens"),
        ("PrefixTuningConfig", r" attend to .* keys.* \(prefix tuning, a"),
    ],
)
def test_virtual_tokens_are_refused(kind: str, words: str, compiled: bool) -> None:
    model = adapted("qwen3", lambda peft: getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedError, match=words) as told:
        LLM(model, num_pages=20, compile=compiled)
    assert "torch.compile(" not in str(told.value) and "compile=False" not in str(told.value)


class Tokens(nn.Module):
    """forward(idx) of x-transformers' wrapper, whose **kwargs lead nowhere."""

    def __init__(self, **layout: Any) -> None:
        super().__init__()
        x_transformers = pytest.importorskip("x_transformers")
        torch.manual_seed(0)
        layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **layout)
        self.net = x_transformers.TransformerWrapper(num_tokens=96, max_seq_len=128, use_abs_pos_emb=False, attn_layers=layers)
        for parameter in self.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)

    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.net(idx)
        return logits


ROTARY = {"rotary_pos_emb": True}


@pytest.mark.parametrize("mixed", ["attn_pre_talking_heads", "attn_post_talking_heads"])
def test_talking_heads(mixed: str) -> None:
    model = Tokens(**ROTARY, **{mixed: True}).eval()
    assert_serves(model, [greedy_loop(copy.deepcopy(model), prompt, 8) for prompt in PROMPTS])


@pytest.mark.parametrize(
    "layout",
    [
        {"rel_pos_bias": True},
        {"alibi_pos_bias": True, "alibi_num_heads": 2},
        {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},  # an MLP of the distance, with a square weight of 8 rows
        {**ROTARY, "num_residual_streams": 2},
        {**ROTARY, "attn_gate_values": True, "attn_gate_value_heads": True},
    ],
    ids=lambda layout: [*layout][-1],
)
def test_what_calls_einx(layout: dict[str, Any]) -> None:
    model = Tokens(**layout).eval()
    assert_serves(model, [greedy_loop(copy.deepcopy(model), prompt, 8) for prompt in PROMPTS])


@pytest.mark.parametrize("length", [9, 40])  # too short for a proof, and long enough
def test_a_bias_that_was_kept_for_a_short_call_grows_again(length: int) -> None:
    model = Tokens(alibi_pos_bias=True, alibi_num_heads=2).eval()
    expected = greedy_loop(copy.deepcopy(model), PROMPTS[0], 60)
    model(torch.zeros(1, length, dtype=torch.long))
    with LLM(model, num_pages=20) as llm:
        assert llm.generate([PROMPTS[0]], SamplingParams(max_new_tokens=60, ignore_eos=True))[0].token_ids == expected
    rows = model.net.attn_layers.rel_pos.bias.shape[-1]  # tracing grows it by a few, to see whether it grows
    assert rows < max(length, 10) + 8, "what the self-check called it for does not stay in the model"


def test_factors_by_the_number_of_tokens_that_cancel() -> None:
    """xPos divides keys and multiplies queries by powers that count from the middle of a call, so that no batch could hold its keys."""
    model = Tokens(**ROTARY, rotary_xpos=True).eval()
    assert_serves(model, [greedy_loop(copy.deepcopy(model), prompt, 8) for prompt in PROMPTS])


class LoopedWindow(Decoder):
    """litgpt's window: a mask that is filled token by token."""

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x = self.embed(idx) + self.learned(torch.arange(idx.shape[1]))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.full((idx.shape[1], idx.shape[1]), float("-inf"))
        for row in range(idx.shape[1]):
            mask[row, max(0, row - 3) : row + 1] = 0.0
        return self.head(x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)), None


def test_a_loop_over_tokens_is_named() -> None:
    words = r"constant at \S*test_other_packages\.py:\d+ \(`for row in range\(idx\.shape\[1\]\):`\), .* calls of one length\. Python loops"
    with pytest.raises(UnsupportedError, match=words):
        LLM(LoopedWindow(lambda model, x: x).eval(), num_pages=20)


class WhereExperts(Decoder):
    """litgpt's experts: each adds to the rows that chose it."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x + model.learned(torch.arange(x.shape[1])))
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x = self.place(self, self.embed(idx))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        rows = x.view(-1, 16)
        weights, chosen = torch.topk(self.gate(rows), 2)
        weights, result = weights.softmax(1), torch.zeros_like(rows)
        masks = (chosen.unsqueeze(-1) == torch.arange(4)).permute(2, 0, 1)
        for mask, expert in zip(masks, self.experts, strict=True):
            row, place = torch.where(mask)
            result[row] += weights[row, place, None] * expert(rows[row])
        return self.head(x + 3 * result.view(x.shape)), None


def test_experts_that_pick_their_rows() -> None:
    model = WhereExperts().eval()
    assert_serves(model, [greedy_loop(model, prompt, 8) for prompt in PROMPTS])


class CachedBias(Decoder):
    """x-transformers' ALiBi: a bias that is kept as a buffer, and made by what is compiled for each shape where that is too short."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: x)
        self.register_buffer("bias", None)

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, length = self.embed(idx), idx.shape[1]
        if self.bias is None or self.bias.shape[-1] < length:
            rows = torch.tensor([[-abs(i - j) * 0.5 for j in range(length)] for i in range(length)])
            self.register_buffer("bias", rows)
        bias = self.bias[:length, :length].masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.head(x + 3 * F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(-2)), None


def test_where_a_table_ends_that_only_the_model_itself_can_make_longer_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = CachedBias().eval()
    expected = [greedy_loop(copy.deepcopy(model), prompt, 8) for prompt in PROMPTS]
    model(torch.zeros(1, 48, dtype=torch.int64))
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        assert llm.engine.limits.max_positions == 48 < POSITIONS
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING" and record.name == "paged_attn"]
    assert "CachedBias is served for up to 48 positions, where a table of it ends, though it runs longer ones itself" in warning
