"""`generate` and `generate_with`: a decoding loop for `model.generate(..., custom_generate=...)` that hands the batch to an engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.llm import LLM
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.hf.generate.kept_engine import engine_for
from paged_attn.hf.generate.refuse import CALLED_BY_ITSELF, ON_PAGES, callers_keywords, refuse_others
from paged_attn.hf.generate.request_params import ScoreKeeper, params_of_rows, params_with_scores

Output = Tensor | GenerateDecoderOnlyOutput
Scores = Callable[[int], tuple[Tensor, ...] | None]


def generate(
    model: PreTrainedModel | None = None,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    **model_kwargs: Any,
) -> Output:
    """For `model.generate(..., custom_generate=paged_attn.generate)`: the batch runs in an engine, which is created at the first call and
    kept with the model. Its settings are the defaults or those of PAGED_ATTN_* variables; `generate_with` sets others.

    Returns:
        What `generate` returns: tokens [B, L] int64, or a GenerateDecoderOnlyOutput with sequences, and scores and logits if requested.
        Greedy tokens equal transformers' own. Sampled tokens have the same probabilities and follow torch's default generator, but are
        other draws.

    Raises:
        UnsupportedError: anything other than greedy decoding or sampling of token ids; or a model that `LLM` refuses.
        TypeError: called by anything but `generate`.
    """
    return _generate(_config(), model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)


def generate_with(*called: Any, **settings: Any) -> Callable[..., Output]:
    """`generate` with engine settings: `model.generate(..., custom_generate=paged_attn.generate_with(kv_memory_gib=8))`. A model
    has one engine at a time: an engine with other settings replaces it.

    Raises:
        ValueError or TypeError: as for `LLM`; or `generation_config` is among the settings, which each call passes itself.
    """
    if called:
        raise TypeError("generate_with makes what generate calls: custom_generate=paged_attn.generate_with(...), with its brackets")
    if "generation_config" in settings:
        raise TypeError("generate_with takes no generation_config; give it to model.generate, which hands over all that it says")
    config = _config(**settings)

    def generate(*args: Any, **given: Any) -> Output:
        return _generate(config, *args, **given)

    return generate


def _config(**settings: Any) -> EngineConfig:
    """Without the checkpoint's defaults: transformers puts those of a call into its processors; anything missing there is off."""
    return EngineConfig.from_environment(**settings, generation_config="ours")


def _generate(
    engine_config: EngineConfig,
    model: PreTrainedModel | None = None,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    **given: Any,
) -> Output:
    if model is None or input_ids is None or logits_processor is None or stopping_criteria is None or generation_config is None:
        raise TypeError(CALLED_BY_ITSELF)
    config, criteria = generation_config, stopping_criteria
    called = callers_keywords()
    refuse_others(model, config, called, given)
    rows, paddings = _prompt_rows(input_ids, given)
    ends = frozenset(i for each in criteria if type(each) is EosTokenCriteria for i in each.eos_token_id.tolist())
    pad = _pad_of(config, criteria)
    others = StoppingCriteriaList(each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria))
    with_scores = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    if with_scores and others and len(rows) > 1:
        raise UnsupportedError(
            f"output_scores or output_logits of a batch with {type(others[0]).__name__}: transformers also returns what a row computes "
            f"after that has ended it, which paged_attn.generate does not know. Give one prompt at a time; or {ON_PAGES}"
        )
    llm = engine_for(model, engine_config)
    longest = min([each.max_length for each in criteria if type(each) is MaxLengthCriteria], default=config.max_length)
    wanted = max(int(longest) - input_ids.shape[1], 0)
    limit = min(llm.engine.limits.allowed_new_tokens(len(row), wanted) for row in rows)
    lengths = [len(row) for row in rows]
    if min(lengths) < max(lengths) and (parted := llm.engine.limits.parted_at(min(lengths), max(lengths) + limit)):
        warnings.warn(parted, stacklevel=5)
    keepers: list[ScoreKeeper] = []
    samples = bool(config.do_sample)
    if with_scores:
        params, keepers = params_with_scores(logits_processor, samples, input_ids, paddings, limit, ends, pad)
    else:
        params = params_of_rows(logits_processor, samples, input_ids, paddings, limit, ends)
    streamer = called["streamer"]
    if others or streamer is not None or with_scores:
        scores = _scores_so_far(keepers, "scores", input_ids) if config.output_scores and with_scores else lambda _: None
        forced = None if with_scores else pad  # with scores, the score keepers continue finished rows with padding
        sequences = Lockstep(input_ids, ends, forced, others, streamer, scores).run(llm, rows, params, limit)
    else:
        sequences = _whole_rows(llm, rows, params, input_ids, pad)
    new = sequences.shape[1] - input_ids.shape[1]
    if streamer is not None:
        streamer.end()
    if new == limit < wanted:
        warnings.warn(
            f"generate() ended after {limit} new tokens, where the model's {llm.engine.limits.max_positions} positions end; "
            f"{wanted} were asked for",
            stacklevel=5,
        )
    if not config.return_dict_in_generate:
        return sequences
    kept = {name: _scores_so_far(keepers, name, input_ids)(new) for name in ("scores", "logits") if getattr(config, f"output_{name}")}
    return GenerateDecoderOnlyOutput(sequences=sequences, **kept)  # type: ignore[arg-type]


def _whole_rows(llm: LLM, rows: list[list[int]], params: Any, input_ids: Tensor, pad: int | None) -> Tensor:
    """Generates all rows to their ends, then pads them on the right."""
    found = [completion.token_ids for completion in llm.generate(rows, params, progress=False)]
    longest = max(map(len, found))
    new = torch.tensor([tokens + [pad or 0] * (longest - len(tokens)) for tokens in found], dtype=torch.int64)
    return torch.cat([input_ids, new.view(len(rows), longest).to(input_ids.device)], 1)


def _pad_of(config: GenerationConfig, criteria: StoppingCriteriaList) -> int | None:
    """The token that follows the end of a row; None if rows continue with their own tokens, as in transformers without end tokens."""
    if not any(hasattr(each, "eos_token_id") for each in criteria):
        return None
    pad: Any = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    if pad is None:
        raise ValueError("a stopping criterion has end tokens, but there is no pad_token_id for rows that have ended; give generate one")
    return int(pad[0] if isinstance(pad, (list, tuple)) else pad)


def _scores_so_far(keepers: list[ScoreKeeper], name: str, input_ids: Tensor) -> Callable[[int], tuple[Tensor, ...]]:
    """A function: number of columns -> their scores, [B, V] each."""
    rows: list[list[Tensor]] = [getattr(keeper, name) for keeper in keepers]
    found: list[Tensor] = []

    def so_far(columns: int) -> tuple[Tensor, ...]:
        found.extend(torch.stack([row[i] for row in rows]).to(input_ids.device) for i in range(len(found), columns))
        return tuple(found[:columns])

    return so_far


def _prompt_rows(input_ids: Tensor, given: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Each row's tokens without its padding, and the number of padding tokens on its left.

    Args:
        input_ids: [B, L] int64.
        given: the other inputs of the model: attention_mask [B, L] or None, position_ids or None.

    Raises:
        UnsupportedError: padding other than on the left, a row of only padding, or positions that do not count up from 0.
    """
    if not len(input_ids):
        raise ValueError("input_ids has no row; give at least one prompt")
    mask = given.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if real.shape != input_ids.shape or not bool(((real == 0) | (real == 1)).all()):
        raise UnsupportedError(
            f"attention_mask has the shape {list(real.shape)} or values other than 0 and 1; paged_attn.generate takes one of 0 and 1 in "
            f"the shape of input_ids, {list(input_ids.shape)}. generate(..., past_key_values=paged_attn.PagedCache(model)) takes any."
        )
    lengths = real.sum(1)
    if bool((real.diff(dim=1) < 0).any()) or bool((lengths == 0).any()):
        raise UnsupportedError(
            "attention_mask has a 0 behind a 1, or a row of only zeros: paged_attn.generate takes prompts with their padding on the left "
            "(tokenizer.padding_side = 'left'), as transformers' generate wants them"
        )
    positions = given.get("position_ids")
    if positions is not None and not bool(((positions.to(input_ids.device) == real.cumsum(1) - 1) | (real == 0)).all()):
        raise UnsupportedError(
            "position_ids other than 0, 1, 2, ... of each prompt: an engine counts positions itself. Leave them out, or run "
            "generate(..., past_key_values=paged_attn.PagedCache(model))"
        )
    rows = [row[-length:] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]
    return rows, (input_ids.shape[1] - lengths).tolist()


@dataclass
class Lockstep:
    """A batch in transformers' order, column by column, built from rows whose tokens arrive in any order.

    Column k is complete when every unfinished row has its k-th new token; a row's tokens beyond the last column are dropped.

    Args:
        input_ids: [B, L] int64, padded; grows with every column.
        ends: token ids that end a row.
        pad: the token that follows the end of a row; None: no row ends by itself.
        criteria: other criteria of the call, a StoppingCriteriaList, or None.
        streamer: receives every column.
        scores: number of columns -> their scores, for the criteria.
    """

    input_ids: Tensor
    ends: frozenset[int]
    pad: int | None
    criteria: Any
    streamer: Any
    scores: Scores
    columns: int = 0
    _tokens: list[list[int]] = field(default_factory=list)
    _goes_on: list[bool] = field(default_factory=list)
    _ids: dict[int, str] = field(default_factory=dict)

    def run(self, llm: LLM, rows: list[list[int]], params: list[SamplingParams], max_new_tokens: int) -> Tensor:
        """Runs until every row has ended or there are `max_new_tokens` columns; returns [B, L + columns] int64."""
        self._tokens, self._goes_on = [[] for _ in rows], [True] * len(rows)
        if not max_new_tokens:
            return self.input_ids
        with closing(llm.stream(rows, params)) as events:
            for event in events:
                self._ids[event.index] = event.request_id
                if event.token_id is not None:
                    self._tokens[event.index].append(event.token_id)
                while self._is_whole():
                    for row in self._add_column():
                        llm.cancel(self._ids[row])
                    if not any(self._goes_on) or self.columns == max_new_tokens:
                        return self.input_ids
        raise AssertionError(f"rows of {[len(tokens) for tokens in self._tokens]} tokens ended before column {self.columns}")

    def _is_whole(self) -> bool:
        rows = zip(self._tokens, self._goes_on, strict=True)
        return all(len(tokens) > self.columns for tokens, goes_on in rows if goes_on or self.pad is None)

    def _add_column(self) -> list[int]:
        """Adds the next column; returns the rows that ended with it."""
        column, pad, before = self.columns, self.pad, list(self._goes_on)
        chosen = [tokens[column] if goes_on or pad is None else pad for tokens, goes_on in zip(self._tokens, self._goes_on, strict=True)]
        self.columns += 1
        added = torch.tensor(chosen)
        self.input_ids = torch.cat([self.input_ids, added.to(self.input_ids.device)[:, None]], 1)
        for row, token in enumerate(chosen):
            self._goes_on[row] = before[row] and token not in self.ends
        if self.criteria:
            done = self.criteria(self.input_ids, self.scores(self.columns)).tolist()
            self._goes_on = [goes_on and not ended for goes_on, ended in zip(self._goes_on, done, strict=True)]
        if self.streamer is not None:
            self.streamer.put(added)
        return [] if pad is None else [row for row in range(len(before)) if before[row] and not self._goes_on[row]]
