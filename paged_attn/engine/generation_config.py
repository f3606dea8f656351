"""transformers' `GenerationConfig` as sampling settings: a checkpoint's, for every request, or one passed with a request."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paged_attn.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig

# transformers' names of the settings for sampling only, and of those that also apply to greedy decoding.
DRAWN = ("temperature", "top_k", "top_p", "min_p")
ALWAYS = ("max_new_tokens", "min_new_tokens", "repetition_penalty", "bad_words_ids", "stop_strings", "num_return_sequences")
# What else would change tokens: the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0,), "dola_layers": (), "diversity_penalty": (0,), "typical_p": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],), "sequence_bias": ({},), "token_healing": (False,), "guidance_scale": (1,), "watermarking_config": (),
    "constraints": (), "force_words_ids": (), "max_time": (), "min_length": (0,),
}  # fmt: skip
logger = logging.getLogger("paged_attn")


def default_params(model: Any, ends: Collection[int] = ()) -> SamplingParams:
    """What the model's own generation_config states for every request: nothing if it has none. How tokens are drawn is taken from it only
    if it says do_sample, as in `generate`. What it asks for and is not served is told in a warning.

    Args:
        ends: what the model ends an answer with.

    Raises:
        ValueError: it holds a value that no request may have.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return SamplingParams()
    stated = _stated(config, bool(getattr(config, "do_sample", None)), 1.0, ends)
    stated.pop("num_return_sequences", None)  # the number of answers is for the caller to choose
    if others := _not_served(config):
        logger.warning("the model's generation_config asks for %s, which is not served and left out", ", ".join(others))
    try:
        return SamplingParams(**stated)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the model's generation_config: {error}; generation_config='ours' takes nothing from it") from error


def as_params(given: Any, defaults: SamplingParams, ends: Collection[int] = ()) -> SamplingParams:
    """`SamplingParams` as they are; of a `GenerationConfig` what it states means what it means to `generate`.

    Args:
        defaults: of the model, which say whether it samples where the config does not.
        ends: what the model ends an answer with where the config does not say.

    Raises:
        TypeError: it is neither.
        ValueError: the config asks for what is not served, such as beams.
    """
    if isinstance(given, SamplingParams):
        return given
    if not hasattr(given, "to_diff_dict") or not hasattr(given, "do_sample"):
        raise TypeError(f"params holds {given!r}; allowed are SamplingParams, or a GenerationConfig of transformers")
    config: GenerationConfig = given
    if others := _not_served(config):
        what = "transformers' own generate runs on pages with it (docs/generate.md)"
        raise ValueError(f"the GenerationConfig asks for {', '.join(others)}, which is not served; {what}, or leave it out")
    if getattr(config, "max_length", None) is not None and config.max_new_tokens is None:
        raise ValueError(f"the GenerationConfig has max_length={config.max_length}, which counts the prompt, too; give max_new_tokens")
    samples = not defaults.is_greedy if config.do_sample is None else config.do_sample
    own: dict[str, Any] = {}
    if config.eos_token_id is not None:  # replaces the model's own
        ends = end_tokens(config.eos_token_id)
        own = {"stop_token_ids": ends, "ignore_eos": True}
    stated = _stated(config, samples, 1.0 if defaults.is_greedy else defaults.temperature, ends)
    if not samples:
        stated["temperature"] = 0.0
    return SamplingParams(**stated, **own)


def end_tokens(eos_token_id: Any) -> tuple[int, ...]:
    """What an `eos_token_id` holds: None, a number, or a list or tensor of some."""
    ends = eos_token_id.tolist() if hasattr(eos_token_id, "tolist") else eos_token_id
    return () if ends is None else tuple(map(int, ends)) if isinstance(ends, (list, tuple)) else (int(ends),)


def _stated(config: Any, samples: bool, temperature: float, ends: Collection[int]) -> dict[str, Any]:
    """What it says of sampling; `temperature`: where it says none. To transformers an end token alone is not a bad word."""
    names = (*ALWAYS, *DRAWN) if samples else ALWAYS
    stated = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if "bad_words_ids" in stated:
        stated["bad_words_ids"] = [word for word in stated["bad_words_ids"] if len(word) != 1 or word[0] not in ends]
    if forbidden := getattr(config, "suppress_tokens", None):
        stated["bad_words_ids"] = [*stated.get("bad_words_ids", ()), *([token] for token in forbidden)]
    return {"temperature": temperature, **stated} if samples else stated


def _not_served(config: Any) -> list[str]:
    asked = {name: getattr(config, name, None) for name in REFUSED}
    return [f"{name}={value!r}" for name, value in asked.items() if value is not None and value not in REFUSED[name]]
