"""What `embed`, `classify` and `score` run, and how their results are read: shared by `LLM` and `AsyncLLM`. Pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.pooling.outputs import ClassValues, EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.requests.pooled_rows import PoolingKind, PoolingParams
from paged_attn.engine.requests.request import Request
from paged_attn.shown import shown
from paged_attn.truncation import Cut

Text = str | Sequence[int]


class OwnEngine(Protocol):
    """What a plan needs of `Engine`."""

    pooler: Pooler | None
    is_causal: bool
    runner: Any
    input_processor: Any


@dataclass(frozen=True)
class PoolingPlan:
    """One call.

    Attributes:
        prompts: a request each: texts and token ids; with `pairs` two texts each, which the model's tokenizer joins.
        sides: of texts that are compared and run apart, which side each was given on first, 0 or 1; else empty.
        params: of all of them, but for a pair's token types.
        read: the call's answer, of these requests when all have ended.
    """

    prompts: Sequence[Any]
    pairs: bool
    params: PoolingParams
    read: Callable[[Sequence[Request]], list[PoolingOutput[Any]]]
    sides: Sequence[int] = ()

    def cut_to(self, truncate_prompt_tokens: int | None) -> PoolingPlan:
        """The same of texts that are cut; raises as `PoolingParams` does."""
        return replace(self, params=replace(self.params, truncate_prompt_tokens=truncate_prompt_tokens))


def embed_plan(
    engine: OwnEngine, prompts: Sequence[Text], pooling: PoolingKind | None, normalize: bool | None, dimensions: int | None
) -> PoolingPlan:
    """See `PoolingCalls.embed`."""
    pooler = _pooler_of(engine, "embed", heads=False)
    pooler.check_dimensions(dimensions)

    def read(requests: Sequence[Request]) -> list[PoolingOutput[Any]]:
        rows = [pooler.embedding(request.pooled_row(), normalize, dimensions).tolist() for request in requests]
        return _outputs(map(EmbeddingValues, rows), requests)

    return PoolingPlan(prompts, False, pooler.params(engine.is_causal, pooling), read)


def classify_plan(engine: OwnEngine, prompts: Sequence[Text]) -> PoolingPlan:
    """See `PoolingCalls.classify`."""
    pooler = _pooler_of(engine, "classify", heads=True)

    def read(requests: Sequence[Request]) -> list[PoolingOutput[Any]]:
        logits = pooler.logits([request.pooled_row() for request in requests])
        return _outputs(map(ClassValues, pooler.probs(logits).tolist(), logits.tolist()), requests)

    return PoolingPlan(prompts, False, pooler.params(engine.is_causal), read)


def score_plan(engine: OwnEngine, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> PoolingPlan:
    """See `PoolingCalls.score`."""
    pairs = paired(text_1, text_2)
    pooler = _pooler_of(engine, "score", heads=None)
    params = pooler.params(engine.is_causal)
    if pooler.head is None:
        side_of = {text: side for pair in reversed(pairs) for side, text in reversed(list(enumerate(pair)))}
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each is embedded once
        sides = [side_of[text] for text in texts]
        return PoolingPlan(texts, False, params, lambda requests: _cosines(pooler, pairs, dict(zip(texts, requests, strict=True))), sides)
    pooler.check_scores()

    def read(requests: Sequence[Request]) -> list[PoolingOutput[Any]]:
        scores = pooler.scores(pooler.logits([request.pooled_row() for request in requests])).tolist()
        return _outputs(map(ScoreValues, scores), requests)

    return PoolingPlan(pairs, True, params, read)


def _cosines(pooler: Pooler, pairs: Sequence[tuple[str, str]], requests: dict[str, Request]) -> list[PoolingOutput[Any]]:
    rows: dict[str, Tensor] = {text: pooler.embedding(request.pooled_row()) for text, request in requests.items()}
    results = []
    for index, (first, second) in enumerate(pairs):
        one, other = requests[first], requests[second]
        score = ScoreValues(float(F.cosine_similarity(rows[first], rows[second], dim=-1)))
        both = one.prompt_token_ids + other.prompt_token_ids
        results.append(PoolingOutput(index, score, both, one.cached_tokens + other.cached_tokens))
    return results


def _pooler_of(engine: OwnEngine, call: str, heads: bool | None) -> Pooler:
    """`heads`: whether a classifier must or must not be there. Raises UnsupportedError: the engine's model is for something else."""
    pooler = engine.pooler
    if pooler is None:
        name = type(engine.runner.model).__name__
        raise UnsupportedError(
            f"{call} needs a model that embeds or classifies, and this LLM of {name} generates: LLM(..., task='embed' or 'classify')"
        )
    if heads is not None and heads is not (pooler.head is not None):
        other = "it embeds: use embed, or load a checkpoint with a head of classes" if heads else "it classifies: use classify or score"
        raise UnsupportedError(f"{call} is not for this LLM of {pooler.body.name}: {other}; see the task of LLM")
    return pooler


def _outputs(values: Iterable[Any], requests: Sequence[Request]) -> list[PoolingOutput[Any]]:
    return [
        PoolingOutput(index, value, list(request.prompt_token_ids), request.cached_tokens)
        for index, (value, request) in enumerate(zip(values, requests, strict=True))
    ]


class PairTokens(NamedTuple):
    """Two texts in one row, or one: token ids, and which of both texts a token is of where the tokenizer says so."""

    ids: Sequence[int]
    token_types: list[int] | None


def pair_tokens(tokenizer: Any, first: str, second: str, cut: Cut | None = None) -> PairTokens:
    """As transformers' tokenizer joins two texts, and shortens the longer one where they are to be cut. Raises ValueError: there is no
    tokenizer."""
    if tokenizer is None:
        raise ValueError("a pair of texts is joined by the model's tokenizer, and there is none; give LLM(model, tokenizer=...)")
    encoded = tokenizer(first, second, **({} if cut is None else {"truncation": "longest_first", "max_length": cut.most}))
    return PairTokens(list(encoded.input_ids), encoded.get("token_type_ids"))


def paired(text_1: Any, text_2: Any) -> list[tuple[str, str]]:
    """One text with each of many, or texts with texts. Raises ValueError: two lists of different lengths. TypeError: no texts. Both begin
    with the name of the side at fault."""
    lists = [[given] if isinstance(given, str) else given for given in (text_1, text_2)]
    for name, given, texts in zip(("text_1", "text_2"), (text_1, text_2), lists, strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(each, str) for each in texts):
            raise TypeError(f"{name}: got {shown(given)}; allowed: a text, or a list of texts")
    left, right = list(lists[0]), list(lists[1])
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise ValueError(f"text_2: got {len(right)} texts beside {len(left)} of text_1; allowed: as many, or one text_1 for all")
    return list(zip(left, right, strict=True))
