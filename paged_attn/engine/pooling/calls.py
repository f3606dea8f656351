"""`embed`, `classify` and `score`: the methods of an `LLM` whose model embeds or classifies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.pooling.outputs import ClassValues, EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.pooling.texts import Text, pair_tokens, paired
from paged_attn.engine.requests.pooling_params import PoolingKind, PoolingParams
from paged_attn.engine.requests.request import Request


class PoolingCalls:
    """Mixed into `LLM`, which has the engine."""

    tokenizer: Any
    _lock: Any
    _step: Callable[[], None]
    _token_ids: Callable[[Any], Sequence[int]]
    _listed: Callable[[Any], list[Any]]
    _drop: Callable[[list[Request]], None]
    _raise_errors: Callable[[list[Request]], None]

    def embed(
        self,
        prompts: Text | Sequence[Text],
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
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
            namespace, priority: as of `generate`.

        Raises:
            UnsupportedError: this LLM generates or classifies (see `task`).
            ValueError, TypeError: another pooling, dimensions that there are not, or a prompt that `Engine.add_request` refuses.
        """
        pooler = self._pooler("embed", heads=False)
        pooler.check_dimensions(dimensions)
        ids = [self._token_ids(prompt) for prompt in self._listed(prompts)]
        params = pooler.params(self._own_engine.is_causal, pooling)
        with self._pooled(ids, [params] * len(ids), namespace, priority) as requests:
            rows = [pooler.embedding(request.pooled_row(), normalize, dimensions) for request in requests]
            return [_output(i, EmbeddingValues(row.tolist()), r) for i, (row, r) in enumerate(zip(rows, requests, strict=True))]

    def classify(self, prompts: Text | Sequence[Text], *, namespace: Any = None, priority: int = 0) -> list[PoolingOutput[ClassValues]]:
        """The probability of each label, `.outputs.probs`, of each text; `logits` are those of the model's own call.

        Args:
            prompts, namespace, priority: as of `generate`.

        Raises:
            UnsupportedError: this LLM is no classifier (see `task`).
            ValueError, TypeError: a prompt that `Engine.add_request` refuses.
        """
        pooler = self._pooler("classify", heads=True)
        ids = [self._token_ids(prompt) for prompt in self._listed(prompts)]
        with self._pooled(ids, [pooler.params(self._own_engine.is_causal)] * len(ids), namespace, priority) as requests:
            logits = pooler.logits([request.pooled_row() for request in requests])
            values = map(ClassValues, pooler.probs(logits).tolist(), logits.tolist())
            return [_output(i, value, request) for i, (value, request) in enumerate(zip(values, requests, strict=True))]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, namespace: Any = None, priority: int = 0
    ) -> list[PoolingOutput[ScoreValues]]:
        """How well texts go together, `.outputs.score`: one with each of many, or each with its own.

        A classifier of one label (a cross-encoder) reads both texts in one row, as its tokenizer joins them; of a model that embeds it is
        the cosine of both embeddings.

        Raises:
            UnsupportedError: this LLM generates, or its classifier has several labels.
            ValueError, TypeError: texts that do not pair, or a prompt that `Engine.add_request` refuses.
        """
        pairs = paired(text_1, text_2)
        pooler = self._pooler("score", heads=None)
        if pooler.head is None:
            return self._cosines(pooler, pairs, namespace, priority)
        pooler.check_scores()
        tokens = [pair_tokens(self.tokenizer, *pair) for pair in pairs]
        params = [pooler.params(self._own_engine.is_causal, token_types=each.token_types) for each in tokens]
        with self._pooled([each.ids for each in tokens], params, namespace, priority) as requests:
            scores = pooler.scores(pooler.logits([request.pooled_row() for request in requests])).tolist()
            return [_output(i, ScoreValues(score), r) for i, (score, r) in enumerate(zip(scores, requests, strict=True))]

    @property
    def _own_engine(self) -> Any:
        return vars(self)["engine"]

    def _cosines(self, pooler: Pooler, pairs: Sequence[tuple[str, str]], namespace: Any, priority: int) -> list[PoolingOutput[ScoreValues]]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each is embedded once
        ids = [self._token_ids(text) for text in texts]
        with self._pooled(ids, [pooler.params(self._own_engine.is_causal)] * len(ids), namespace, priority) as requests:
            found: dict[str, tuple[Tensor, Request]] = {
                text: (pooler.embedding(request.pooled_row()), request) for text, request in zip(texts, requests, strict=True)
            }
        results = []
        for index, (first, second) in enumerate(pairs):
            (one, request), (other, more) = found[first], found[second]
            score = ScoreValues(float(F.cosine_similarity(one, other, dim=-1)))
            both = request.prompt_token_ids + more.prompt_token_ids
            results.append(PoolingOutput(index, score, both, request.cached_tokens + more.cached_tokens))
        return results

    def _pooler(self, call: str, heads: bool | None) -> Pooler:
        """heads: whether a classifier must or must not be there."""
        pooler: Pooler | None = self._own_engine.pooler
        if pooler is None:
            name = type(self._own_engine.runner.model).__name__
            raise UnsupportedError(
                f"{call} needs a model that embeds or classifies, and this LLM of {name} generates: LLM(..., task='embed')"
            )
        if heads is not None and heads is not (pooler.head is not None):
            other = "it embeds: use embed, or load a checkpoint with a head of classes" if heads else "it classifies: use classify or score"
            raise UnsupportedError(f"{call} is not for this LLM of {pooler.body.name}: {other}; see the task of LLM")
        return pooler

    @contextmanager
    def _pooled(
        self, ids: Sequence[Sequence[int]], params: Sequence[PoolingParams], namespace: Any, priority: int
    ) -> Iterator[list[Request]]:
        """Requests that have ended; they are forgotten afterwards."""
        requests: list[Request] = []
        try:
            with self._lock:
                for index, (tokens, each) in enumerate(zip(ids, params, strict=True)):
                    try:
                        requests.append(
                            self._own_engine.add_request(tokens, each, namespace=namespace, priority=priority, text_at_end=True)
                        )
                    except (ValueError, TypeError) as error:
                        error.add_note(f"(prompt {index} of {len(ids)})")
                        raise
            while any(request.finish_reason is None for request in requests):
                self._step()
                self._raise_errors(requests)
            self._raise_errors(requests)  # another thread may have run the last step
            yield requests
        finally:
            self._drop(requests)


def _output(index: int, values: Any, request: Request) -> PoolingOutput[Any]:
    return PoolingOutput(index, values, list(request.prompt_token_ids), request.cached_tokens)
