"""A classifier's head, run by its own code on one pooled row per text; which row it takes is determined numerically."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.body import Body
from paged_attn.calling.evaluating import as_served, evaluating
from paged_attn.calling.plain_modes import plain_modes
from paged_attn.engine.requests.pooling_params import KINDS, PoolingKind
from paged_attn.passes.fx.model_facts import model_device, model_dtype
from paged_attn.tolerances import logits_apart

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
