"""Checks that text can be generated from a model's output: logits over the tokens that it reads, one row per token of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.call_signature import few_ids, plain_inputs, takes
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.engine.model.auto_class import refuse_other_kinds
from paged_attn.engine.model.rows_of_logits import forget_how, logits_in, logits_of_all
from paged_attn.passes.fx.model_facts import is_vocabulary, max_positions, model_device

TOKENS = 5


class TokenIds(NamedTuple):
    """Which token ids a model has; each bound is one above the largest.

    Attributes:
        read: of those that a prompt may hold; None if no table of the model says so.
        chosen: of those that there are logits for. A padded table has rows for more.
        tried: of those that checks make prompts of.
    """

    read: int | None
    chosen: int
    tried: int


def check_output(model: nn.Module, may_pick_rows: bool = True) -> TokenIds:
    """Call the model on a few tokens, as its users do, and look at what comes.

    Args:
        may_pick_rows: it may give the logits of the last token alone (`rows_of_logits.py`).

    Raises:
        UnsupportedError: the model does not continue texts; there are no logits; they are not [1, T, width] for [1, T] token ids, or not
            over the ids that the model reads (it has no language-model head, is a classifier or a reward model, or has prompt tuning);
            or the call replaces modules or writes weights.
    """
    refuse_other_kinds(model)
    forget_how(model)
    _refuse_renormalised(model)
    count = min(TOKENS, max_positions(model) or TOKENS)
    ids = few_ids(model, 1 + count, model_device(model))[1:] % TOKENS  # in an order that differs from that of positions
    inputs = plain_inputs(model, ids) | ({"use_cache": False} if takes(model, "use_cache") else {})
    name = type(model).__name__
    tables = set[int]()
    with as_served(model), left_as_it_was(model) as changes:
        _note_lookups(model, ids, tables)
        with model_code(lambda why: UnsupportedError(f"{name} itself cannot be called on {len(ids)} token ids: {why}")):
            output = model(**inputs)
    for path, (was, came) in changes.modules.items():
        raise UnsupportedError(
            f"{name} replaces its own {path}, a {type(was).__name__}, by a {type(came).__name__} when it is called on {len(ids)} "
            "tokens, so that what it computes depends on the calls before. Put it into its final state before you give it to LLM: set "
            "it, or call it once; after that it is served as it is then."
        )
    logits = logits_in(output)
    if not isinstance(logits, Tensor):
        raise UnsupportedError(
            f"{name} returns {_kind_of(output)}, and no logits: it has no language-model head, and there is nothing to choose tokens by. "
            "Load the model with its head (AutoModelForCausalLM), or wrap it in a module that returns logits [1, T, vocabulary]."
        )
    width = logits.shape[-1]
    over_tokens = [size for size in tables if is_vocabulary(width, size)]
    if logits.shape[:-1] in ((1,), (1, 1)) and (over_tokens or not tables) and may_pick_rows:
        logits = logits_of_all(model, ids)
    if logits.shape[:-1] != (1, len(ids)):
        why = _why(logits, len(ids), bool(over_tokens) or not tables)
        raise UnsupportedError(f"{name} returns logits of shape {list(logits.shape)} for token ids [1, {len(ids)}]{why}")
    says = getattr(model, "can_generate", None)
    if tables and not over_tokens and not (callable(says) and says()):
        raise UnsupportedError(
            f"{name} returns {width} numbers for each token and reads {' or '.join(map(str, sorted(tables)))} token ids: those "
            "are not logits over its tokens (a model without a language-model head, or a classifier), and the largest of them is not a "
            "token. Load the model with its head (AutoModelForCausalLM); a module whose output is over other tokens than its input says "
            "that it generates with a method can_generate() that returns True."
        )
    return TokenIds(min(over_tokens, default=None), int(width), min([*tables, int(width)]))


def _refuse_renormalised(model: nn.Module) -> None:
    """Weights that are written whenever they are read would make whatever was computed before out of date."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{path} writes its weights whenever it is called (max_norm={module.max_norm:g}), so that they are other weights for every "
                "step. Renormalise them once, which gives the same tokens: with torch.no_grad(), "
                "torch.embedding_renorm_(m.weight, torch.arange(m.num_embeddings), m.max_norm, m.norm_type); then m.max_norm = None"
            )


def _note_lookups(model: nn.Module, ids: Tensor, sizes: set[int]) -> None:
    """From now on the sizes of the tables in which all of these ids are looked up come to `sizes`."""

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].numel() == len(ids) and torch.equal(args[0].flatten(), ids):
            assert isinstance(module, nn.Embedding)
            sizes.add(module.num_embeddings)

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(note)


def _why(logits: Tensor, tokens: int, over_tokens: bool) -> str:
    """What shapes that are met say of a model, and what to do."""
    if logits.dim() == 2 and not over_tokens:
        return (
            ": numbers for the whole sequence and not for each token (a classifier, a reward model); there is nothing to choose tokens by"
        )
    if logits.shape[:-1] in ((1,), (1, 1)):
        return (
            ": those of the last token alone, and a batch of several requests needs the last token of each. Return the "
            "logits of all tokens; the engine computes only those that it wants"
        )
    if logits.dim() == 3 and logits.shape[1] > tokens:
        added = logits.shape[1] - tokens
        return f": it puts {added} rows of its own among the tokens (prompt tuning), and a row of a batch is a token"
    return "; known is [1, T, vocabulary]"


def _kind_of(output: Any) -> str:
    names = [name for name in (output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else ())]
    return f"a {type(output).__name__}" + (f" of {', '.join(map(str, names))}" if names else "")
