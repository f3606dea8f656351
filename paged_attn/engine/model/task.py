"""What a model is for: to continue a text, to embed one, or to classify one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from paged_attn.shown import shown

if TYPE_CHECKING:
    from torch import nn

Task: TypeAlias = Literal["auto", "generate", "embed", "classify"]
TASKS = get_args(Task)
CLASSIFIER = "ForSequenceClassification"


def checked_task(task: str) -> Task:
    """Raises ValueError: not one of `TASKS`."""
    if task not in TASKS:
        raise ValueError(f"task: got {shown(task)}; allowed: {', '.join(map(repr, TASKS))}")
    return cast(Task, task)


def task_of_config(config: Any, embeds: bool) -> Task:
    """Of a checkpoint; `embeds`: its folder says how it embeds, as those of sentence-transformers do."""
    name = str((getattr(config, "architectures", None) or [""])[0])
    if name.endswith(CLASSIFIER):
        return "classify"
    return "embed" if embeds or is_encoder(name, config) else "generate"


def task_of_model(model: nn.Module) -> Task:
    """Of a loaded model."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if name.endswith(CLASSIFIER):
        return "classify"
    return "embed" if config is not None and is_encoder(name, config) else "generate"


def is_encoder(name: str, config: Any) -> bool:
    """Whether a class is an encoder, with a head for masked words or without."""
    from transformers.models.auto import modeling_auto as known

    kind = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False) or not isinstance(kind, str) or kind not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return False
    if getattr(config, "is_decoder", False) or not name:
        return False
    return name in (known.MODEL_FOR_MASKED_LM_MAPPING_NAMES[kind], known.MODEL_MAPPING_NAMES.get(kind))
