"""What a model accepts: vocabulary, positions, end tokens; and how many KV pages fit."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import page_elements
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, page_bytes_ratio
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec, slot_bytes
from paged_attn.calling.body import Body
from paged_attn.engine.config import EngineConfig
from paged_attn.passes.fx.model_facts import max_positions, text_config
from paged_attn.shown import shown

CPU_KV_GIB = 0.25
GPU_KV_SHARE = 0.8
STATE_SHARE = 0.5  # of that, at most, for recurrent state
TOKENS_WITHOUT_KV = 1 << 20
logger = logging.getLogger("paged_attn")


@dataclass(frozen=True)
class ModelLimits:
    """Limits that the model's own config states, or its tables show; None where there is none."""

    vocab_size: int | None
    max_positions: int | None
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: Any, positions: int | None = None) -> ModelLimits:
        """`positions`: the limit that the model's graph shows, config included; without it the config's alone."""
        text = text_config(model)
        if isinstance(model, Body):
            limits = [limit for limit in (model.longest, positions) if limit is not None]
            return cls(model.vocab_size, min(limits, default=None), frozenset())
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        vocab = getattr(embeddings, "num_embeddings", None) or getattr(text, "vocab_size", None)
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        eos = eos if eos is not None else getattr(text, "eos_token_id", None)
        ids = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
        return cls(vocab, max_positions(model) if positions is None else positions, frozenset(int(i) for i in ids))

    def checked_prompt(self, ids: Sequence[int], more: int = 0) -> list[int]:
        """The prompt as a list of ints.

        Args:
            more: how many tokens it may have beyond the model's positions.

        Raises:
            ValueError: it is empty, holds ids that this model does not have, or is longer than its positions.
            TypeError: it is not a list of whole numbers.
        """
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"a prompt of token ids is {shown(ids)}; allowed is a list of int; tokenize it first")
        try:
            prompt = [operator.index(i) for i in ids]
        except TypeError as error:
            raise TypeError(f"a prompt of token ids is a {type(ids).__name__}: {error}; allowed is a list of int") from error
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token (for a fresh start, the model's BOS or end-of-text token)")
        if self.vocab_size is not None:
            for position, token in enumerate(prompt):
                if not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"token id {shown(token)} at position {position} of the prompt is out of range; "
                        f"this model has ids 0 to {self.vocab_size - 1}"
                    )
        if self.max_positions is not None and len(prompt) > self.max_positions + more:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the model has {self.max_positions} positions; "
                f"shorten it by {len(prompt) - self.max_positions - more}"
            )
        return prompt

    def check_biases(self, biases: Iterable[tuple[int, float]]) -> None:
        """Raises ValueError for a token id that this model does not have."""
        for token, _ in biases:
            if self.vocab_size is not None and token >= self.vocab_size:
                raise ValueError(f"logit_bias: got token id {shown(token)}; allowed: 0 to {self.vocab_size - 1}, the ids of this model")

    def allowed_new_tokens(self, prompt: int, wanted: int) -> int:
        """`wanted`, cut so that no token lies past the model's positions (such a request ends with "length")."""
        return wanted if self.max_positions is None else max(min(wanted, self.max_positions - prompt + 1), 0)


def pool_pages(
    config: EngineConfig,
    layers: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    state_bytes: int = 0,
    kept_free: int = 0,
    groups: Sequence[LayerGroup] = (),
) -> int:
    """Pages of the pool, page 0 included: as configured, or as many as the memory setting holds beside `state_bytes` of recurrent state.

    With groups of layers a page holds those of one group; then `num_pages` pages of all layers are as many of these as take their bytes.

    Args:
        kept_free: bytes of free memory that something else will take, such as graphs.

    Raises:
        UnsupportedError: fewer than two fit, or than one for each group and one more; the message does the sum.
    """
    if config.num_pages is not None:
        of_all, of_group = page_bytes_ratio(layers, groups)
        return max(config.num_pages * of_all // of_group, 1 + len(groups)) if groups else config.num_pages
    page_bytes = page_elements(layers, config.page_size, groups) * dtype.itemsize
    if page_bytes == 0:  # no attention: a page is only a count of tokens
        return 1 + -(-TOKENS_WITHOUT_KV // config.page_size)
    budget = _memory_budget(config, device, kept_free) - state_bytes
    pages = int(budget // page_bytes)
    if pages < (least := 1 + max(len(groups), 1)):
        raise UnsupportedError(
            f"{budget / 2**20:.1f} MiB for KV holds {pages} pages of {page_bytes / 2**20:.2f} MiB; at least {least} are needed. "
            "Raise kv_memory_gib or lower page_size."
        )
    return pages


class StateSlots(NamedTuple):
    """Slots of recurrent state: for running requests, slot 0 included, and after them for snapshots at the ends of prefixes."""

    running: int
    snapshots: int

    @property
    def total(self) -> int:
        return self.running + self.snapshots


NO_STATE = StateSlots(0, 0)


def num_state_slots(config: EngineConfig, layers: Sequence[RecurrentSpec], device: torch.device, chunks: bool = True) -> StateSlots:
    """One slot for each request that may run and one per snapshot, as far as half of the memory setting holds them; none for a model
    without recurrent layers.

    Args:
        chunks: whether every layer takes several tokens at once onto a state. Where one does not, what follows a reused prefix runs token
            by token, slower than the whole prompt at once: there snapshots are only made if asked for.

    Raises:
        UnsupportedError: not one request fits; the message does the sum.
    """
    if not layers:
        return NO_STATE
    each, budget = slot_bytes(layers), _memory_budget(config, device) * STATE_SHARE
    fit = int(budget // each) - 1
    wanted = config.state_snapshots
    if not config.prefix_cache:
        snapshots = 0
    elif wanted is not None:
        snapshots = wanted
    else:
        snapshots = min(config.max_requests, fit // 4) if chunks else 0
    if fit - snapshots < 1:
        advice = "Raise kv_memory_gib or lower state_snapshots." if snapshots else "Raise kv_memory_gib."
        raise UnsupportedError(
            f"{budget / 2**20:.1f} MiB for recurrent state ({STATE_SHARE:.0%} of the memory for KV) holds {fit + 1} slots of "
            f"{each / 2**20:.2f} MiB; at least {2 + snapshots} are needed. {advice}"
        )
    slots = StateSlots(min(config.max_requests, fit - snapshots) + 1, snapshots)
    logger.info(
        "recurrent state: %d slots for requests and %d for snapshots of %.2f MiB, %.1f MiB in all",
        slots.running, snapshots, each / 2**20, slots.total * each / 2**20,
    )  # fmt: skip
    return slots


def _memory_budget(config: EngineConfig, device: torch.device, kept_free: int = 0) -> float:
    """Bytes for KV and recurrent state."""
    if config.kv_memory_gib is not None:
        return config.kv_memory_gib * 2**30
    if device.type == "cuda":
        return max(torch.cuda.mem_get_info(device)[0] - kept_free, 0) * GPU_KV_SHARE
    return CPU_KV_GIB * 2**30
