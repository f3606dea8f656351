"""Which transformers Auto class loads a checkpoint so that it generates text, and the message if none does."""

from __future__ import annotations

from typing import Any

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.model.task import is_encoder
from paged_attn.passes.fx.model_facts import text_config

ENCODER_DECODER = "is an encoder-decoder: what it says next depends on states of another text, which no page of this one's KV holds"
ENCODER = "is an encoder, which reads a text in both directions: it gives embeddings (task='embed') or masked words, and no next token"
READS_BOTH_WAYS = (
    "reads a prompt in both directions (use_bidirectional_attention in the config of its text model): the KV of each token depends on the "
    "whole prompt, so that no chunk of it can be computed alone and no prefix shared"
)
OTHER_WAYS = "transformers' own generate() runs it"


def auto_class(config: Any, name: str) -> Any:
    """AutoModelForCausalLM, or for models that read images or sound, too, the class whose `generate` takes text alone as well. `config`: of
    the checkpoint at `name`. Raises UnsupportedError: it is not a model that continues a text."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return transformers.AutoModelForCausalLM
    what = _named(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name!r} holds {what}, which {ENCODER_DECODER}. {OTHER_WAYS}")
    if type(config) in known.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        causal: Any = known.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if causal is None or causal.__name__ not in (config.architectures or ()):
            raise UnsupportedError(f"{name!r} holds {what}, which {ENCODER}")
    for kind, auto in (
        (known.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
        (known.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.AutoModelForMultimodalLM),
    ):
        if type(config) in kind:
            return auto
    raise UnsupportedError(f"{name!r} holds {what}, which transformers knows as no language model: there is nothing that continues a text")


def refuse_other_kinds(model: nn.Module) -> None:
    """Raises UnsupportedError for a loaded model of transformers that continues no text, by what it is and not by how that shows."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        return
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{name} {ENCODER_DECODER}. {OTHER_WAYS}")
    if getattr(text_config(model), "use_bidirectional_attention", False) is True:  # some have "vision" there, which is no matter of text
        raise UnsupportedError(f"{name} {READS_BOTH_WAYS}. {OTHER_WAYS}")
    from transformers.models.auto import modeling_auto as known

    if is_encoder(name, config) and name != known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type):
        raise UnsupportedError(f"{name} {ENCODER}")


def _named(config: Any) -> str:
    """`a T5ForConditionalGeneration`, or the type of a config that does not say."""
    return f"a {(getattr(config, 'architectures', None) or [config.model_type])[0]}"
