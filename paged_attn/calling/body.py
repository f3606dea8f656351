"""A model without its head, as a module that returns hidden states: an engine that embeds traces and runs it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.calling.call_signature import takes, token_argument
from paged_attn.passes.fx.model_facts import max_positions

POSITIONS = "position_ids"


class Body(nn.Module):
    """The hidden states after a model's last norm.

    Ids may say a segment, too: id + vocabulary * token type, for bodies that read token_type_ids.

    Args:
        model: of transformers, with a head or without; its own body (`base_model`) is called, and nothing of it is changed.

    Attributes:
        name: of the model's class, for messages.
        vocab_size, num_types: ids are below the first, token types below the second.
        padding_id: an id that the model does not count when it numbers tokens (the RoBERTa family), so that no text may hold it; None if it
            counts all.

    Raises:
        UnsupportedError: it has no body of transformers' kind, or an encoder and a decoder.
    """

    body: Any  # not nn.Module, which has none of transformers' methods

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.name, config = type(model).__name__, getattr(model, "config", None)
        body: Any = getattr(model, "base_model", None)
        if config is None or not isinstance(body, nn.Module):
            raise UnsupportedError(
                f"{self.name} is not a model of transformers: nothing says which of its values are the hidden states of its tokens, so it "
                "cannot embed. Give a model of transformers, or a directory"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError(f"{self.name} is an encoder-decoder: there is no one row for each token of a text, and none is embedded")
        self.body = body
        parameters = inspect.signature(body.forward).parameters
        self._token = token_argument(body)
        self._fixed: dict[str, Any] = {"use_cache": False} if takes(body, "use_cache") else {}
        self._takes_positions = takes(body, POSITIONS)
        self.vocab_size = int(self.get_input_embeddings().num_embeddings)
        self.num_types = max(getattr(config, "type_vocab_size", None) or 1, 1) if "token_type_ids" in parameters else 1
        embeddings: Any = getattr(body, "embeddings", None)
        numbers_without_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
        self.padding_id: int | None = embeddings.padding_idx if numbers_without_padding else None
        self._first_position = 0 if self.padding_id is None else self.padding_id + 1

    @property
    def config(self) -> Any:
        """The body's own."""
        return self.body.config

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        config = self.config.get_text_config()
        return int(getattr(config, "hidden_size", None) or self.get_input_embeddings().embedding_dim)

    @property
    def num_ids(self) -> int:
        """Ids with their token types are below it."""
        return self.vocab_size * self.num_types

    @property
    def longest(self) -> int | None:
        """Tokens that there are positions for, as the config says; None if it does not."""
        limit = max_positions(self)
        return None if limit is None else limit - self._first_position

    def get_input_embeddings(self) -> Any:
        """The body's."""
        return self.body.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        """The body's."""
        self.body.set_attn_implementation(name)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: Tensor | None = None) -> Tensor:
        """input_ids, position_ids [1, T] and logits_to_keep [N], int64 -> [1, T or N, hidden] in the model's dtype."""
        more: dict[str, Any] = dict(self._fixed)
        if self.num_types > 1:
            more["token_type_ids"] = input_ids // self.vocab_size
            input_ids = input_ids % self.vocab_size
        if self._first_position:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None] if position_ids is None else position_ids
            more[POSITIONS] = positions + self._first_position
        elif position_ids is not None and self._takes_positions:
            more[POSITIONS] = position_ids
        hidden: Tensor = self.body(**{self._token: input_ids}, **more).last_hidden_state
        return hidden if logits_to_keep is None else hidden[:, logits_to_keep]
