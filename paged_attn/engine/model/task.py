"""What a model is for: to continue a text, to embed one, or to classify one."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast, get_args

from paged_attn.shown import shown

Task: TypeAlias = Literal["auto", "generate", "embed", "classify"]
TASKS = get_args(Task)
CLASSIFIER = "ForSequenceClassification"


def checked_task(task: str) -> Task:
    """Raises ValueError: not one of `TASKS`."""
    if task not in TASKS:
        raise ValueError(f"task: got {shown(task)}; allowed: {', '.join(map(repr, TASKS))}")
    return cast(Task, task)


def task_of(name: str, config: Any, embeds: bool = False) -> Task:
    """The task of a class of this name; `embeds`: its folder says how it embeds, as those of sentence-transformers do."""
    if name.endswith(CLASSIFIER):
        return "classify"
    return "embed" if embeds or is_encoder(name, config) else "generate"


def is_encoder(name: str, config: Any) -> bool:
    """Whether a class is an encoder, with a head for masked words or without."""
    kind = getattr(config, "model_type", None)
    if not isinstance(kind, str) or getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False) or not name:
        return False
    from transformers.models.auto import modeling_auto as known

    with_head = known.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind)
    return with_head is not None and name in (with_head, known.MODEL_MAPPING_NAMES.get(kind))
