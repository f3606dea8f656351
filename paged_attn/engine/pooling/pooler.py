"""A model that embeds or classifies, as an engine runs it: its body, its head, and how a pooled row is processed.

A classifier's head is run by its own code on one pooled row per text; which row it takes is determined numerically.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.body import Body
from paged_attn.calling.peft_models import served_inside_peft
from paged_attn.calling.plain_modes import as_served, evaluating, plain_modes
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.engine.pooling.sentence_transformers import EmbeddingDefaults
from paged_attn.engine.requests.pooled_rows import KINDS, PoolingKind, PoolingParams
from paged_attn.passes.fx.model_facts import model_device, model_dtype
from paged_attn.shown import shown
from paged_attn.tolerances import logits_apart

_IDENTITY = "Identity"
AS_USUAL = EmbeddingDefaults()


@dataclass(frozen=True)
class Pooler:
    """One model.

    Attributes:
        model: as it was given, or the one inside that peft or torch.compile wraps; body: what the engine runs of it.
        head: of a classifier; None for a model that embeds.
        defaults: how it embeds unless a caller says otherwise; `pooling` None: "last" for a causal model, else "mean".
        labels: the names of a classifier's logits, in order.
    """

    model: nn.Module
    body: Body
    head: Head | None = None
    defaults: EmbeddingDefaults = AS_USUAL
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, task: str, defaults: EmbeddingDefaults | None = None) -> Pooler:
        """A pooler for a loaded model, for the task "embed" or "classify".

        Raises:
            UnsupportedError: there is no body to embed by, or no head whose row is known; or a model of peft that computes more than the
                one inside.
        """
        model = served_inside_peft(uncompiled(model))
        body = Body(model)
        if task == "embed":
            return cls(model, body, None, defaults or AS_USUAL)
        if not hasattr(model.config, "id2label"):
            raise UnsupportedError(f"{type(model).__name__} has no labels: it is not a classifier. LLM(model, task='embed') embeds")
        labels: dict[int, str] = model.config.id2label  # type: ignore[assignment]
        return cls(model, body, Head(model, body), labels=tuple(labels[index] for index in sorted(labels)))

    @property
    def has_its_body(self) -> bool:
        """Whether the model still has the body that the engine runs."""
        return getattr(self.model, "base_model", None) is self.body.body

    @property
    def some_id(self) -> int:
        """A token id that any text may hold, for a text of one token."""
        padding = {self.body.padding_id, None if self.head is None else self.head.padding_id}
        return next(token for token in range(self.body.vocab_size) if token not in padding)

    def params(self, is_causal: bool, pooling: PoolingKind | None = None) -> PoolingParams:
        """The parameters of a request, where `pooling` is what the caller wants."""
        if self.head is not None:
            return PoolingParams(self.head.pooling)
        return PoolingParams(pooling or self.defaults.pooling or ("last" if is_causal else "mean"))

    def check(self, ids: Sequence[int], params: object) -> None:
        """Refuse a request that cannot be embedded or classified. Raises UnsupportedError: params of a request that generates; ValueError:
        padding that the model would not count: it would take the text for another one."""
        if not isinstance(params, PoolingParams):
            does = "embeds texts (llm.embed)" if self.head is None else "classifies texts (llm.classify)"
            raise UnsupportedError(f"this engine of {self.body.name} {does} and continues none; see the task of LLM")
        if self.body.padding_id is not None and self.body.padding_id in ids:
            raise ValueError(
                f"the text holds the padding token {self.body.padding_id}, which {self.body.name} does not count when it numbers tokens; "
                "leave padding out: texts of any lengths go together"
            )
        padding = None if self.head is None else self.head.padding_id
        if padding is not None and params.pooling == "last" and len(ids) and ids[-1] == padding:
            raise ValueError(
                f"the text ends with the padding token {padding}, and {self.body.name} classifies by the token before it; leave padding "
                "out: texts of any lengths go together"
            )

    def embedding(self, row: Tensor, normalize: bool | None = None, dimensions: int | None = None) -> Tensor:
        """row [W] float32, pooled -> [W or dimensions]."""
        if dimensions is not None:
            row = row[:dimensions]
        wanted = self.defaults.normalize if normalize is None else normalize
        return F.normalize(row, dim=-1) if wanted else row

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises ValueError: more than there are, or none."""
        if dimensions is not None and (isinstance(dimensions, bool) or not 1 <= dimensions <= self.body.width):
            raise ValueError(
                f"dimensions: got {shown(dimensions)}; allowed: 1 to {self.body.width}, the numbers of this model's embeddings"
            )

    def logits(self, rows: Sequence[Tensor]) -> Tensor:
        """rows [W] float32, N of them -> [N, labels] float32, by the model's own head."""
        assert self.head is not None
        return self.head(torch.stack(list(rows)))

    def probs(self, logits: Tensor) -> Tensor:
        """logits [N, labels] -> [N, labels]: sigmoid for one label and for several that may hold together, as they are for a regression,
        else softmax."""
        problem = getattr(self.body.config, "problem_type", None)
        if problem == "regression":
            return logits
        return logits.sigmoid() if problem == "multi_label_classification" or len(self.labels) == 1 else logits.softmax(-1)

    def scores(self, logits: Tensor) -> Tensor:
        """logits [N, 1] of pairs -> [N]: sigmoid, unless the config of a cross-encoder has the numbers themselves."""
        config: Any = self.body.config
        own = getattr(config, "sentence_transformers", None)
        activation = own.get("activation_fn") if isinstance(own, dict) else getattr(config, "sbert_ce_default_activation_function", None)
        return logits[:, 0] if str(activation).endswith(_IDENTITY) else logits[:, 0].sigmoid()

    def check_scores(self) -> None:
        """Raises UnsupportedError for a classifier of several labels: none of them says how well two texts go together."""
        if len(self.labels) != 1:
            raise UnsupportedError(
                f"{self.body.name} has {len(self.labels)} labels ({', '.join(self.labels[:4])}): none of them says how well two texts go "
                "together. Models that score pairs have one label; classify gives the probabilities of all"
            )


LENGTHS = (7, 4)  # tokens in the texts that show which row a head takes


class Head:
    """What a classifier computes behind its body.

    Args:
        model: with a body `base_model`; its other modules are the head's, those that it has when they are called, and nothing of it is
            changed.

    Attributes:
        pooling: which row the head takes.

    Raises:
        UnsupportedError: no row gives the model's own logits.
    """

    def __init__(self, model: Any, body: Body) -> None:
        self._of_body = body.body
        self._given = _Given(body.body)
        self._model, self._clone = model, copy.copy(model)
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        self.padding_id: int | None = padding
        self._is_single = padding is None  # transformers' own heads then refuse batches
        name = type(model).__name__
        with model_code(lambda why: UnsupportedError(f"{name}: its head cannot be run on hidden states alone: {why}")):
            self.pooling = self._find_pooling(model, body)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [N, W], pooled -> logits [N, labels] float32, on the CPU."""
        device, dtype = model_device(self._of_body), model_dtype(self._of_body)
        parts = rows.to(device, dtype)[:, None].split(1 if self._is_single else max(len(rows), 1))
        self._clone._modules = {name: self._given if part is self._of_body else part for name, part in self._model._modules.items()}
        with plain_modes(), evaluating(self._clone):
            return torch.cat([self._clone(inputs_embeds=part).logits.float() for part in parts]).cpu()

    def _find_pooling(self, model: Any, body: Body) -> PoolingKind:
        refused = {self.padding_id, body.padding_id}
        known = [token for token in range(2, min(body.vocab_size, 64)) if token not in refused]
        device, generator = model_device(model), torch.Generator().manual_seed(3)
        fits: set[PoolingKind] = set(KINDS)
        errors: list[str] = []
        with as_served(model):
            for length in LENGTHS:
                ids = torch.tensor([known])[:, torch.randint(0, len(known), (length,), generator=generator)].to(device)
                expected = model(input_ids=ids).logits.float().cpu()
                hidden = body(ids)[0]
                rows = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}
                for kind in KINDS:
                    error, limit = logits_apart(expected, self(rows[kind][None]), model_dtype(model))
                    if not error <= limit:
                        fits.discard(kind)
                        errors.append(f"{kind} {error:.2g}")
        if len(fits) != 1:
            raise UnsupportedError(
                f"{type(model).__name__}: its head takes none of the last, the first and the mean of the hidden states, so that no logits "
                f"of it can be computed of one row (off by {', '.join(errors) or 'nothing, whichever is taken'}). transformers' own call "
                "runs it"
            )
        return fits.pop()


class _Given(nn.Module):
    """In the place of a body: gives back the hidden states that it is given, and what the body's own pooler makes of them."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        self._pooler = getattr(body, "pooler", None)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

        pooled = self._pooler(inputs_embeds) if self._pooler is not None else None
        return Output(last_hidden_state=inputs_embeds, pooler_output=pooled)
