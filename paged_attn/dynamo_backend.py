"""The Dynamo backend "paged_attn": found by torch.compile through its entry point, without importing us."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from paged_attn.attn_ops.context import current_context
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.compiled.options import ALLOWED, CompileOptions
from paged_attn.compiled_graph import CompiledGraph

logger = logging.getLogger("paged_attn")
_graphs: weakref.WeakKeyDictionary[nn.Module, list[CompiledGraph]] = weakref.WeakKeyDictionary()
_graphs_lock = threading.Lock()


def paged_attn(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured.

    Raises:
        ValueError: an unknown option or a mode; TypeError: an option of the wrong type.
        UnsupportedError: an attention that cannot be proved (Dynamo wraps it in BackendCompilerFailed).
    """
    parsed = CompileOptions.parse(options)
    if mode not in (None, "default"):
        raise ValueError(f"backend='paged_attn' has no mode {mode!r}; leave mode out. {ALLOWED}")
    model = model_being_compiled()
    compiled = CompiledGraph.of_trace(gm, example_inputs, model, parsed)
    if model is not None:
        with _graphs_lock:
            known = _graphs.setdefault(model, [])
            alike = [other for other in known if other.split is not None and other.traced_with == compiled.traced_with]
            if compiled.split is not None and alike and current_context() is not None:
                name = type(model).__name__
                logger.warning("%s was compiled again for paged batches%s; all lengths should share one compile", name, _why())
            known.append(compiled)

    def run(*args: Any) -> Any:
        if "transformers" in sys.modules and current_context() is None:
            from paged_attn.hf.compiled_generate.install import install_paged_calls

            install_paged_calls(parsed)
        return compiled(*args)

    return run


def graphs_of(model: nn.Module) -> list[CompiledGraph]:
    """The graphs compiled so far for a model (or for the model inside torch.compile's wrapper), oldest first."""
    with _graphs_lock:
        return list(_graphs.get(uncompiled(model), ()))


def add_graphs(model: nn.Module, graphs: Sequence[CompiledGraph]) -> None:
    """Count graphs as this model's: Dynamo runs them for it, though it compiled some for another model of the same configuration."""
    with _graphs_lock:
        known = _graphs.setdefault(model, [])
        known.extend(graph for graph in dict.fromkeys(graphs) if graph not in known)


def model_being_compiled() -> nn.Module | None:
    """The module whose forward, or a decorator around it, Dynamo is compiling now; None if it compiles a plain function."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    scope = translator.f_locals
    owners = [scope.get("self"), scope.get("model"), *list(scope.get("args") or ())[:1]]  # the names of `graph_tools.of_module`
    return next((owner for owner in owners if isinstance(owner, nn.Module)), None)


def _why() -> str:
    from torch._dynamo.utils import get_metrics_context

    metrics = get_metrics_context()
    reason = metrics._metrics.get("recompile_reason") if metrics.in_progress() else None
    return f" because {reason.splitlines()[0].strip()}" if reason else ""
