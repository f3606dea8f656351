"""A model that is not causal by itself is refused for that, in every dtype, and not for what came of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.model.causality import refuse_acausal, refuse_branches, refuse_random
from tests.engine.runners.own_positions import greedy_loop
from tests.oracle import random_prompts
from tests.tiny_models import build
from tests.zoo.build import build as build_type
from tests.zoo.oracle import generate

CHOICE = r"DogeForCausalLM itself is not causal: .*of more than 8 keys, which 8 a query takes changes with the number of tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_among_equal_scores_is_refused_where_it_is_made(dtype: torch.dtype) -> None:
    model = build_type("doge", keep_window_size=8, sliding_window=None).to(dtype)
    with pytest.raises(UnsupportedError, match=CHOICE):
        LLM(model, num_pages=40)


def test_below_the_number_of_keys_that_it_keeps_the_model_is_served() -> None:
    model = build_type("doge", keep_window_size=64, sliding_window=None, max_position_embeddings=64)
    prompts = random_prompts((1, 5, 17, 33))
    with LLM(model, num_pages=40, max_batch_tokens=16) as llm:
        layers = llm.engine.runner.layers  # traced as far as it has positions, where it chooses no keys
        assert [spec.chooses for spec in layers] == [None] * 3  # type: ignore[attr-defined]
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))]
    assert got == [generate(model, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("compiled", [True, False])
def test_one_scale_for_all_tokens_of_a_call_is_refused(compiled: bool) -> None:
    model: nn.Module = build("qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    words = r"itself is not causal: in a call of 24 tokens .* computed from all tokens of a call at once, .* or the scale"
    with pytest.raises(UnsupportedError, match=words) as told:
        LLM(model, num_pages=20, compile=compiled)
    assert "compile" not in str(told.value)


class Plain(nn.Module):
    """Logits of a token alone, up to `longest` tokens, plus `mixed` of the mean over the call."""

    def __init__(self, mixed: float = 0.0, longest: int = 1000) -> None:
        super().__init__()
        self.table, self.mixed, self.longest = nn.Embedding(96, 96), mixed, longest

    def forward(self, input_ids: Tensor) -> Tensor:
        assert input_ids.shape[1] <= self.longest
        x: Tensor = self.table(input_ids)
        return x + self.mixed * x.mean(1, keepdim=True)


@pytest.mark.parametrize("start", [0, 40])
def test_what_is_compared(start: int) -> None:
    refuse_acausal(Plain(), start, 96, "")
    refuse_acausal(Plain(mixed=1.0, longest=start + 20), start, 96, "")  # it cannot be called on so many
    with pytest.raises(UnsupportedError, match=rf"Plain itself is not causal: in a call of {start + max(24, start)} tokens .*: it means"):
        refuse_acausal(Plain(mixed=1.0), start, 96, "it means")


@pytest.mark.parametrize("compiled", [True, False])
def test_dropout_that_no_mode_turns_off_is_refused(compiled: bool) -> None:
    model = build("llama").eval()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: nn.functional.dropout(output, 0.2))
    with pytest.raises(UnsupportedError, match=r"gives other logits for the same tokens when it is called again, .* draws random numbers"):
        LLM(model, num_pages=20, compile=compiled)


class Notes(Plain):
    """Puts `last` in the place of a table of its own in every call, or nothing, and does without an attribute."""

    def __init__(self, last: object) -> None:
        super().__init__()
        self._seen: object = {"calls": 0}
        self.spare: object = torch.ones(2)
        self.last = last

    def forward(self, input_ids: Tensor) -> Tensor:
        if isinstance(seen := vars(self).pop("_seen", None), dict):
            seen["calls"] += 1
        vars(self).pop("spare", None)
        if self.last != "nothing":
            self._seen = self.last
        return super().forward(input_ids)


@pytest.mark.parametrize("last", [None, "nothing", {"calls": 0}, [1]])
def test_tables_that_calls_replace_and_attributes_that_they_delete_are_put_back(last: object) -> None:
    model = Notes(last)
    seen, spare = model._seen, model.spare
    refuse_random(model.eval(), 96)
    assert model._seen is seen and seen == {"calls": 0} and model.spare is spare


class Branching(nn.Module):
    """Attention that is twice as sharp in calls of up to `few` tokens."""

    def __init__(self, few: int, sharper: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few, self.sharper = few, sharper
        self.embed, self.qkv, self.head = nn.Embedding(96, 16), nn.Linear(16, 48), nn.Linear(16, 96)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(input_ids)
        q, k, v = self.qkv(x + torch.sin(position_ids[..., None] * 0.1).to(x.dtype)).chunk(3, -1)
        if input_ids.shape[1] <= self.few:
            q = q * self.sharper
        attended = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.head(attended[:, 0])


class OneToken(Branching):
    """In a call of one token, and in no other, values are sharper."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits * self.sharper if input_ids.shape[1] == 1 else logits


class OfSomeLengths(Branching):
    """Other logits in calls of `only` tokens, or whose number leaves nothing over when it is divided by `only`."""

    def __init__(self, only: int, multiples: bool) -> None:
        super().__init__(0, 1.0)
        self.only, self.multiples = only, multiples

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits, tokens = super().forward(input_ids, position_ids), input_ids.shape[1]
        return logits * 2 if (tokens % self.only == 0 if self.multiples else tokens == self.only) else logits


class OfTheBest(Branching):
    """Mixture of depths: the half of a call's tokens that a router rates highest attend to each other, the others pass by."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        best = x.sum(-1).topk(max(1, x.shape[1] // 2), dim=1).indices.sort(1).values[..., None].expand(-1, -1, x.shape[-1])
        q, k, v = self.qkv(x.gather(1, best)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return self.head(x.scatter_add(1, best, attended))


def test_a_choice_among_the_tokens_of_a_call() -> None:
    with pytest.raises(UnsupportedError, match=r"OfTheBest itself is not causal: .* that a router rates highest \(mixture of depths\)"):
        LLM(OfTheBest(4, 1.0).eval(), num_pages=20)


@pytest.mark.parametrize("few", [4, 60])
def test_another_answer_in_short_calls_is_refused_without_the_self_check(few: int) -> None:
    with pytest.raises(
        UnsupportedError, match=r"Branching computes something else in short calls: it branches on the number of tokens, at "
    ):
        LLM(Branching(few, 5.0).eval(), num_pages=20, self_check=False)
    LLM(Branching(few, 1.0).eval(), num_pages=20, self_check=False).close()


def test_another_answer_to_a_single_token_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"OneToken computes something else in a call of one token: .* for a step of decoding"):
        LLM(OneToken(1, 5.0).eval(), num_pages=20, self_check=False)


class Rounding(Branching):
    """In 16 bits, rounding that depends on the number of tokens moves all logits by a fifth, as routers of many layers do."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits, numbers = super().forward(input_ids, position_ids), torch.Generator().manual_seed(input_ids.shape[1])
        return logits + 0.2 * logits.std() * torch.randn(1, 1, 96, generator=numbers).to(logits.dtype)


@pytest.mark.parametrize("excepted", [(), (2, 4, 5, 9, 100)])
def test_rounding_is_no_branch(excepted: tuple[int, ...]) -> None:
    refuse_branches(Rounding(0, 1.0).to(torch.bfloat16).eval(), 2, 64, excepted)
    for model, count in ((OneToken(1, 5.0), "one token"), (OfSomeLengths(100, multiples=False), "some lengths")):
        if count == "one token" or excepted:
            with pytest.raises(UnsupportedError, match=rf"calls? of {count}"):
                refuse_branches(model.to(torch.bfloat16).eval(), 2, 64, excepted)


class Chaotic(nn.Module):
    """Each of twelve blocks makes what rounding does ten times as large; a token alone is `apart` of its size off in `places` of them."""

    def __init__(self, apart: float, places: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apart, self.places, self.embed, self.head = apart, places, nn.Embedding(96, 16), nn.Linear(16, 96)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            alone = x.shape[1] == 1 and index < self.places
            x = torch.sin(10 * block(x * (1 + self.apart if alone else 1.0)))
        return self.head(x)


def test_rounding_that_grows_from_block_to_block_is_no_branch() -> None:
    with torch.no_grad():
        one, two = (Chaotic(1e-6).eval()(torch.tensor([[5, 6]])[:, :count])[0, 0] for count in (1, 2))
    assert float((one - two).norm() / two.norm()) > 0.1
    refuse_branches(Chaotic(1e-6).eval(), 2, 64)
    for apart, places in ((0.01, 12), (0.1, 1)):
        with pytest.raises(UnsupportedError, match=r"Chaotic computes something else in a call of one token"):
            refuse_branches(Chaotic(apart, places).eval(), 2, 64)


class Residual(nn.Module):
    """24 blocks that add to what they are given; a token alone gets more of each."""

    class Block(nn.Sequential):
        def forward(self, x: Tensor, share: float) -> Tensor:
            return x + super().forward(x) * share

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.share, self.embed, self.norm, self.head = share, nn.Embedding(96, 32), nn.LayerNorm(32), nn.Linear(32, 96)
        made = ([nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)] for _ in range(24))
        self.blocks = nn.ModuleList(self.Block(*parts) for parts in made)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = 3 * self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.share if x.shape[1] == 1 else 1.0)
        return self.head(self.norm(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_parts_of_a_branch_in_each_block_are_no_rounding(dtype: torch.dtype) -> None:
    refuse_branches(Residual(1.0).to(dtype).eval(), 2, 64)
    with pytest.raises(UnsupportedError, match=r"Residual computes something else in a call of one token"):
        refuse_branches(Residual(1.25).to(dtype).eval(), 2, 64)


@pytest.mark.parametrize(("only", "multiples"), [(100, False), (3, True)])
def test_another_answer_in_calls_of_some_lengths_is_refused(only: int, multiples: bool) -> None:
    with pytest.raises(UnsupportedError, match=r"OfSomeLengths computes something else in calls of some lengths: .* call of (100|2) are"):
        LLM(OfSomeLengths(only, multiples).eval(), num_pages=20, self_check=False)


def test_a_branch_beyond_the_models_positions_is_no_matter() -> None:
    model, prompts = Branching(60, 5.0).eval(), random_prompts((1, 5, 33))
    model.config = SimpleNamespace(max_position_embeddings=50)
    with LLM(model, num_pages=20, self_check=False) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
    assert got == [greedy_loop(model, prompt, 8) for prompt in prompts]


def test_a_model_that_takes_no_short_calls_says_nothing_of_them() -> None:
    class NeedsSome(Branching):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            if input_ids.shape[1] < 3:
                raise ValueError("three tokens at least")
            return super().forward(input_ids, position_ids)

    refuse_branches(NeedsSome(60, 1.0).eval(), 61, 64)
    with pytest.raises(UnsupportedError, match="in short calls"):
        refuse_branches(NeedsSome(60, 5.0).eval(), 61, 64)


@pytest.mark.parametrize("longest", [96, 60])
def test_a_scale_made_of_the_largest_position_is_refused_without_the_self_check(longest: int) -> None:
    """Unless no position of the model is so large that it shows."""

    class Scaled(Branching):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
            return super().forward(input_ids, position_ids) * torch.where(position_ids.max() >= 60, 2.0, 1.0)

    model = Scaled(0, 1.0).eval()
    model.config = SimpleNamespace(max_position_embeddings=longest)
    if longest == 60:
        LLM(model, num_pages=20, self_check=False).close()
        return
    with pytest.raises(UnsupportedError, match=r"max_1 mixes tokens.*with max_position_embeddings at most the length"):
        LLM(model, num_pages=20, self_check=False)
