"""Checks that a model's own `generate`, which keeps a cache, gives the logits of calls of all tokens, which are what an engine serves."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.engine.model.rows_of_logits import gives_last_alone, rows_of_logits
from paged_attn.hf.cache_name import CACHE_NAME, CACHE_NAMES
from paged_attn.passes.fx.model_facts import max_positions, model_device, model_dtype
from paged_attn.tolerances import MULTIPLE, logits_limit, row_errors, typical

logger = logging.getLogger("paged_attn")
PROMPT, STEPS = 24, 4  # tokens; the first step is a call of the prompt, the others of one token each
LEAST = 2e-3  # allowed at least: a recurrence rounds otherwise where it goes on from a state
WITH_STATES = ", but for its recurrent layers: those compute the tokens of an answer as they do with a cache"


def refuse_other_generate(model: nn.Module, num_ids: int, positions: bool, recurrent: bool = False) -> None:
    """Compare the logits of a few greedy steps of transformers' `generate` with those of one call of all its tokens.

    Not compared, without an error:

    - a model in 16 bits, where rounding moves an expert's choice or a long recurrence as far as a mistake would;
    - one without transformers' `generate`, one that `generate` cannot run, or one that returns only the last token's logits;
    - one whose forward knows the cache by the name of another version of transformers, which then generates as if there were none.

    Args:
        num_ids: token ids are drawn below that.
        positions: the engine serves what the model computes with position_ids 0, 1, ...
        recurrent: it has layers with states, which compute each token of an answer from the state before it, as with a cache.

    Raises:
        UnsupportedError: already the prompt gives other logits. If only later steps do, with a cache, a warning says so.
    """
    from transformers import GenerationMixin  # not at the top: importing it takes a second, and brings Inductor

    if model_dtype(model).itemsize < 4 or getattr(type(model), "generate", None) is not GenerationMixin.generate:
        return
    if gives_last_alone(model):
        return
    known = [name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters]
    if known and CACHE_NAME not in known:
        logger.info("%s takes %s, and transformers' generate gives it %s: not compared", type(model).__name__, known[0], CACHE_NAME)
        return
    longest = max_positions(model)
    if longest is not None and longest < 2 * PROMPT:
        return
    prompt = torch.randint(0, num_ids, (2 * PROMPT,), generator=torch.Generator().manual_seed(5)).to(model_device(model))
    with as_served(model), left_as_it_was(model), model_may_fail() as failures:
        made, steps = _generated(model, prompt[:PROMPT])
        ids = torch.cat([made, prompt[PROMPT : 2 * PROMPT - STEPS]])  # more tokens behind them, for what rounding alone does
        whole, longer = (rows_of_logits(model, each, positions)[PROMPT - 1 : PROMPT - 1 + len(steps)] for each in (made, ids))
        limit = max(LEAST, logits_limit(model_dtype(model)), MULTIPLE * typical(row_errors(whole, longer)))
        errors = row_errors(whole, steps)
    if failures:
        logger.info("%s.generate is not compared: %s: %s", type(model).__name__, type(failures[0]).__name__, failures[0])
        return
    if typical(errors) <= limit:
        return
    differs = f"{type(model).__name__}.generate() gives other logits than a call of all its tokens:"
    by = f"off by {typical(errors):.2g} of their size (allowed {limit:g})"
    if errors[0] <= limit:
        logger.warning(
            "%s with its cache, token by token, they are %s, because its forward computes something else where it is given a cache (a mask "
            "or window by the length of the call, a shift without its last token, keys that are dropped or rounded there). What is served "
            "are the calls of all tokens%s", differs, by, WITH_STATES if recurrent else "",
        )  # fmt: skip
        return
    raise UnsupportedError(
        f"{differs} already for the prompt, in what it passes to forward, they are {by}, so that there is no one answer to serve. Mend its "
        "prepare_inputs_for_generation, such as the positions there. If the calls of all tokens are right, give LLM a module around it "
        "whose forward(input_ids) returns model(input_ids).logits. Nothing was generated."
    )


def _generated(model: Any, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """All ids, and the logits [STEPS, vocabulary] of each new one."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, use_cache=True, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, disable_compile=True,  # with a static cache it would, for four steps
    )  # fmt: skip
    output = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=settings)
    return output.sequences[0, :-1], torch.cat(output.logits)
