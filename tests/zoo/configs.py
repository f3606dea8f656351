"""`config_for(model_type)`: a tiny config of every causal-LM type of transformers."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.overrides import OVERRIDES
from tests.zoo.shrink import small_values

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny(config_class: type[PreTrainedConfig], fixed: dict[str, Any]) -> PreTrainedConfig:
    """A small config of this class and, in the same way, of its sub-configs; `fixed` holds attributes, by sub-config in a nested dict."""
    parts = config_class.sub_configs
    default = config_class(**fixed.get("default", {}))
    values = {name: value for name, value in default.to_dict().items() if name not in parts}
    small = small_values(values, {name: value for name, value in fixed.items() if name not in parts and name != "default"})
    for name in parts:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig) and fixed.get(name, {}) is not None:
            small[name] = tiny(type(part), fixed.get(name, {}))
    return config_class(**small)


def model_class(model_type: str) -> type[PreTrainedModel]:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    found: type[PreTrainedModel] = getattr(transformers, name[0] if isinstance(name, tuple) else name)
    return found


def config_for(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config that the type's causal LM takes: of a composite type, the part that its class wants."""
    config = tiny(CONFIG_MAPPING[model_type], {**OVERRIDES.get(model_type, {}), **changes})
    wanted = model_class(model_type).config_class
    assert wanted is not None
    if not isinstance(config, wanted):
        for name in config.sub_configs:
            if isinstance(getattr(config, name), wanted):
                part: PreTrainedConfig = getattr(config, name)
                return part
    return config
