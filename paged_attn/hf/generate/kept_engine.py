"""The engine that `generate` keeps with a model: created at the first call, freed with the model."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from torch import nn

from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.llm import LLM
from paged_attn.engine.runners.model_watch import ModelChangedError

logger = logging.getLogger("paged_attn")
ATTRIBUTE = "_paged_attn_engine"  # set on the model; `ModelState` and `model_text` ignore it
_making = threading.Lock()


class KeptEngine:
    """At most one engine of one model. A copied or unpickled model starts without one."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.llm: LLM | None = None
        self._config: EngineConfig | None = None
        self.model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptEngine:
        return KeptEngine()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptEngine, ()

    def get(self, model: nn.Module, config: EngineConfig) -> LLM:
        """The engine with these settings, for the model in its present state. Raises UnsupportedError: see `LLM`; RuntimeError: another
        thread is generating with other settings, or is generating and the model was changed."""
        llm = self.llm
        if llm is not None and (config != self._config or llm.closed or not follows_model(llm)):
            if llm.engine.has_work:
                raise RuntimeError(
                    f"the engine of this {type(model).__name__} is at work for another thread, with other settings or for the model as it "
                    "was before it was changed; wait for that thread, and use one paged_attn.generate_with(...) for all"
                )
            llm.close()
            self.llm = llm = None
        if llm is None:
            self.llm = llm = LLM(model, config=config)
            self._config = config
        return llm


def follows_model(engine: LLM | Engine) -> bool:
    """Whether the engine still computes what its model computes; if not, logs what changed."""
    change = change_of(engine)
    if change is not None:
        logger.warning("the model was changed: %s; generate() makes a new engine", change.changes)
    return change is None


def change_of(engine: LLM | Engine) -> ModelChangedError | None:
    """A change of the model that the engine cannot follow, or None."""
    try:
        engine.look_at_model()
    except ModelChangedError as change:
        return change
    return None


def engine_of(model: nn.Module) -> LLM | None:
    """The engine that `custom_generate=paged_attn.generate` keeps with a model: for its statistics, `explain` and `close`. None before the
    first call and after `close`; the next call creates one."""
    kept = _kept_with(model)
    return None if kept is None or kept.llm is None or kept.llm.closed else kept.llm


def engine_for(model: nn.Module, config: EngineConfig) -> LLM:
    """The model's engine with these settings: the one kept with it, or a new one that replaces it."""
    with _making:
        kept = _kept_with(model)
        if kept is None:
            kept = vars(model)[ATTRIBUTE] = KeptEngine(model)
        return kept.get(model, config)


def _kept_with(model: nn.Module) -> KeptEngine | None:
    kept = getattr(model, "__dict__", {}).get(ATTRIBUTE)
    return kept if isinstance(kept, KeptEngine) and kept.model is not None and kept.model() is model else None
