"""`embed`, `classify` and `score`: the methods of an `LLM` whose model embeds or classifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paged_attn.engine.pooling.outputs import ClassValues, EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.plans import OwnEngine, PairTokens, PoolingPlan, Text, classify_plan, embed_plan, pair_tokens, score_plan
from paged_attn.engine.prompts import as_list
from paged_attn.engine.requests.pooled_rows import PoolingKind
from paged_attn.engine.requests.request import Request
from paged_attn.interrupts import uninterrupted


class PoolingCalls:
    """Mixed into `LLM`, which has all these."""

    tokenizer: Any
    engine: OwnEngine
    _token_ids: Callable[..., Sequence[int]]
    _queue: Callable[..., list[Request]]
    _finish: Callable[..., None]

    def embed(
        self,
        prompts: Text | Sequence[Text],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> list[PoolingOutput[EmbeddingValues]]:
        """An embedding of each text, `.outputs.embedding`, in the order of the texts; all run in one continuous batch.

        Args:
            prompts: as of `generate`.
            pooling: "last" and "cls" take the hidden state of the last or first token, "mean" the mean of all; None: as the checkpoint
                says (sentence-transformers' folders), else "last" for causal models and "mean" for encoders.
            normalize: to length 1; None: as the checkpoint says, else yes.
            dimensions: only the first so many numbers, before normalizing; of use for models that were trained for it.
            truncate_prompt_tokens: of a longer text only the first so many tokens count, those that the tokenizer puts around it included;
                -1: as many as there is room for. None: a text that is too long is refused.
            namespace, priority: as of `generate`.

        Raises:
            UnsupportedError: this LLM generates or classifies (see `task`).
            ValueError, TypeError: another pooling, dimensions that there are not, or a prompt that `Engine.add_request` refuses.
        """
        plan = embed_plan(self.engine, as_list(prompts), pooling, normalize, dimensions)
        return self._pool(plan.cut_to(truncate_prompt_tokens), namespace, priority)

    def classify(
        self, prompts: Text | Sequence[Text], *, truncate_prompt_tokens: int | None = None, namespace: Any = None, priority: int = 0
    ) -> list[PoolingOutput[ClassValues]]:
        """The probability of each label, `.outputs.probs`, of each text; `logits` are those of the model's own call.

        Args:
            prompts, namespace, priority: as of `generate`; truncate_prompt_tokens: as of `embed`.

        Raises:
            UnsupportedError: this LLM is not a classifier (see `task`).
            ValueError, TypeError: a prompt that `Engine.add_request` refuses.
        """
        return self._pool(classify_plan(self.engine, as_list(prompts)).cut_to(truncate_prompt_tokens), namespace, priority)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> list[PoolingOutput[ScoreValues]]:
        """How well texts go together, `.outputs.score`: one with each of many, or each with its own.

        A classifier of one label (a cross-encoder) reads both texts in one row, as its tokenizer joins them; of a model that embeds it is
        the cosine of both embeddings.

        Args:
            truncate_prompt_tokens: as of `embed`; of a pair in one row the longer text is shortened first.

        Raises:
            UnsupportedError: this LLM generates, or its classifier has several labels.
            ValueError, TypeError: texts that do not pair, or a prompt that `Engine.add_request` refuses.
        """
        return self._pool(score_plan(self.engine, text_1, text_2).cut_to(truncate_prompt_tokens), namespace, priority)

    @uninterrupted
    def _pool(self, plan: PoolingPlan, namespace: Any, priority: int) -> list[PoolingOutput[Any]]:
        cut = self.engine.input_processor.cut(plan.params)
        if plan.pairs:
            tokens = [pair_tokens(self.tokenizer, first, second, cut) for first, second in plan.prompts]
        else:
            tokens = [PairTokens(self._token_ids(prompt, cut), None) for prompt in plan.prompts]
        params = [plan.params if types is None else replace(plan.params, token_types=types) for _, types in tokens]
        asked = [(ids, [each], dict[str, Any]()) for (ids, _), each in zip(tokens, params, strict=True)]
        requests = self._queue(asked, namespace=namespace, priority=priority)
        self._finish(requests, progress=False)
        return plan.read(requests)
