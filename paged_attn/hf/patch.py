"""`paged_attn.patch(model)`: the Hugging Face hook, for models that cannot be traced.

The second way to paged attention: transformers' AttentionInterface and AttentionMaskInterface, without torch.compile. Every
layer's spec is proved on entry, the patched model is compared with the original on a ragged probe, and the model is restored on exit.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.calling.hf_configs import attention_configs, attention_implementation
from paged_attn.calling.plain_modes import in_plain_modes
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.check.hooked import Watch, check_hooked
from paged_attn.check.runs.steps import ProbeSettings, probe_prompts
from paged_attn.hf.mask import ProvedMask, prove_mask_function
from paged_attn.passes.fx.model_facts import max_positions, model_device, text_config
from paged_attn.passes.prove.config_claims import check_declared
from paged_attn.passes.prove.mask_family import MaskFamily
from paged_attn.recurrent.discover import refuse_recurrent

NAME = "paged_attn"
_NO_MASK = (
    "this call under a forward context has an attention_mask that hides tokens, which a paged batch does not have: each request sees its "
    "own tokens. Call the model as model(**batch.model_inputs())"
)
# Keywords that transformers passes on to attention without effect on a paged batch.
_SILENT = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
           "output_router_logits", "position_embeddings", "num_items_in_batch", "logits_to_keep"}  # fmt: skip
_patched: weakref.WeakKeyDictionary[nn.Module, tuple[Patched, int]] = weakref.WeakKeyDictionary()
_implementations: dict[int, str] = {}  # id of a patched model's config -> its original implementation
_recording = threading.local()
_watching = threading.local()


class Patched:
    """`with patch(model) as patched:` - `patched.layers` are the specs for a KVPool; the model runs paged under a forward context.

    Outside a forward context the patched model computes the same as before, with its own attention implementation.
    """

    def __init__(self, model: nn.Module, self_check: bool = True, settings: ProbeSettings | None = None) -> None:
        if not hasattr(model, "set_attn_implementation"):
            raise UnsupportedError(
                "paged_attn.patch, and LLM(..., compile=False), hook the attention functions of transformers: they need one of its "
                f"models, and {type(model).__name__} is not one. LLM(model) and torch.compile(model, backend='paged_attn') take any module"
            )
        _refuse_compiled(model)
        self.model, self.self_check, self.settings = model, self_check, settings or ProbeSettings()
        self.layers: tuple[AttentionSpec, ...] = ()
        self._modules: list[nn.Module] = []
        self._undo = ExitStack()

    @in_plain_modes
    def __enter__(self) -> Patched:
        register_attention()
        if any(config._attn_implementation_internal == NAME for config in attention_configs(self.model)):
            raise ContextError(
                "this model is patched already, or one that has the same config object is; leave that patch first. A copy that was made "
                "inside a patch becomes a model of its own by its set_attn_implementation('sdpa')"
            )
        with ExitStack() as undo:
            undo.callback(self._forget)
            prompts = self._probe() if self.self_check else []
            original = self._run_unpatched(prompts)
            for config in attention_configs(self.model):
                _implementations[id(config)] = config._attn_implementation
                undo.callback(_implementations.pop, id(config), None)
            undo.enter_context(attention_implementation(self.model, NAME))
            if not _is_switched(self.model):
                raise UnsupportedError(
                    f"{type(self.model).__name__} does not let its attention be replaced through transformers' AttentionInterface; "
                    "use torch.compile(model, backend='paged_attn')"
                )
            self._record_layers()
            if prompts:
                known = {id(prompt): logits for prompt, logits in zip(prompts, original, strict=True)}
                check_hooked(self, lambda prompt: known[id(prompt)], prompts, self.settings)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()

    def _record_layers(self) -> None:
        found = self._recorded()
        refuse_recurrent(self.model, "paged_attn.patch")
        expected = getattr(text_config(self.model), "num_hidden_layers", "an unknown number of")
        if len(found) != expected:
            raise UnsupportedError(
                f"{type(self.model).__name__} has {expected} layers, but {len(found)} of them called the attention that they were "
                "given: the others compute their own, and would silently lose their mask. Use torch.compile(model, backend='paged_attn')."
            )
        self.layers = tuple(found.values())
        self._know({module: index for index, module in enumerate(found)})

    def record_again(self) -> list[str]:
        """For a model that was changed in the meantime: registers modules that replaced others. Returns the layers that now compute another
        attention; if there are any, nothing is changed here."""
        known = {spec.module: index for index, spec in enumerate(self.layers)}
        try:
            found = self._recorded()
        except UnsupportedError as why:
            return [f"some layer ({why})"]

        def attends_otherwise(now: AttentionSpec) -> bool:
            before = self.layers[known[now.module]] if now.module in known else None
            return before is None or replace(now, kv_layer=before.kv_layer) != before

        others = [spec.module for spec in found.values() if attends_otherwise(spec)]
        if not others:
            self._forget()
            self._know({module: known[spec.module] for module, spec in found.items()})
        return others

    def _know(self, modules: Mapping[nn.Module, int]) -> None:
        """Registers modules with their indices in `layers`."""
        self._modules = list(modules)
        for module, index in modules.items():
            _patched[module] = (self, index)

    def _recorded(self) -> dict[nn.Module, AttentionSpec]:
        """Runs a few tokens so that each attention layer reports what it computes; their values do not matter."""
        found: dict[nn.Module, AttentionSpec] = {}
        names = {module: name for name, module in self.model.named_modules()}
        _recording.state = (self.model, names, found, [])
        tokens = torch.arange(1, 1 + min(8, max_positions(self.model) or 8), device=model_device(self.model))[None]
        try:
            with torch.no_grad():
                self.model(input_ids=tokens, position_ids=tokens - 1, use_cache=False)
        finally:
            _recording.state = None
        return found

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[T, vocabulary] of token ids and positions [T], int64."""
        logits: Tensor = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Inside, every attention of this thread passes its inputs and outputs through `watch`."""
        _watching.watch = watch
        try:
            yield
        finally:
            _watching.watch = None

    def _run_unpatched(self, prompts: list[Tensor]) -> list[Tensor]:
        name = type(self.model).__name__
        what = f"{name} itself cannot run a few tokens given as input_ids and position_ids, which is all that a paged batch has"
        with model_code(lambda why: UnsupportedError(f"{what}: {why}")), torch.no_grad():
            return [self.logits(p, torch.arange(len(p), device=p.device)) for p in prompts]

    def _probe(self) -> list[Tensor]:
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        if not isinstance(getattr(table, "num_embeddings", None), int):
            raise UnsupportedError(
                f"{type(self.model).__name__} reads its tokens from a {type(table).__name__}, and paged_attn.patch knows a model with one "
                "table of token ids; use torch.compile(model, backend='paged_attn')"
            )
        return probe_prompts(model_device(self.model), table.num_embeddings, max_positions(self.model))

    def _forget(self) -> None:
        for module in self._modules:
            _patched.pop(module, None)
        self._modules = []


def patch(model: nn.Module, *, self_check: bool = True) -> Patched:
    """Runs a Hugging Face model's attention on pages under forward contexts, without torch.compile.

    Use as a context manager: `with paged_attn.patch(model) as patched: pool = KVPool(patched.layers, ...)`.

    Raises (on entry, with the model restored):
        UnsupportedError: a layer does not go through the interface, or has a mask that cannot be proved or an unknown keyword; or the
            self-check on a ragged probe fails.
        ContextError: the model is already patched.
    """
    return Patched(model, self_check)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuses compiled models: their code would keep the attention it was compiled with, or be compiled while we record layers."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if uncompiled(module) is not module or module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            own = type(uncompiled(model)).__name__
            what = f"{own} is compiled" if module is model else f"the module {name} of {own} is compiled"
            raise UnsupportedError(
                f"{what}, and paged_attn.patch replaces attention of models that run as they are written; patch the model before anything "
                "of it is compiled, or use torch.compile(model, backend='paged_attn')"
            )


def can_be_hooked(model: nn.Module) -> bool:
    """Whether the model accepts another attention through transformers' interface; `patch` may still refuse what it computes."""
    if not hasattr(model, "set_attn_implementation"):
        return False
    register_attention()
    try:
        with attention_implementation(model, NAME):
            return _is_switched(model)
    except (ValueError, ImportError):
        return False


def _is_switched(model: nn.Module) -> bool:
    return all(config._attn_implementation == NAME for config in attention_configs(model))


def register_attention() -> None:
    """Registers our functions in transformers' tables, which are global to the process; repeating this is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _implementation(config: Any) -> str:
    """The patched model's original implementation, for calls outside forward contexts."""
    if id(config) not in _implementations:
        raise ContextError(
            f"a {type(config).__name__} is set to {NAME!r}, but belongs to no patched model (a copy of one, or one whose patch ended?): "
            "call the model's set_attn_implementation('sdpa'), or another one, and then paged_attn.patch(model) to patch it"
        )
    return _implementations[id(config)]


def _mask(**arguments: Any) -> Any:
    """Called by transformers' create_*_mask in place of sdpa_mask or eager_mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if getattr(_recording, "state", None) is not None:
        return ProvedMask(prove_mask_function(arguments["mask_function"]))
    if current_context() is not None:
        given = arguments.get("attention_mask")
        if isinstance(given, Tensor) and not bool(given.all()):
            raise UnsupportedError(_NO_MASK)
        return None
    original = ALL_MASK_ATTENTION_FUNCTIONS.get(_implementation(arguments["config"]))
    return original(**arguments) if original is not None else None


def _original_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that a module originally called; the eager one is a global of the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    original: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(_implementation(module.config), eager)
    if original is None:
        raise ContextError(f"{type(module).__name__} names no eager attention; call the patched model only under a forward context")
    return original


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """The function that attention layers call: q [1, heads, T, dim] -> [1, T, heads, v_dim]."""
    if getattr(_recording, "state", None) is not None:
        return _record(module, query, key, value, attention_mask, keywords), None
    if getattr(_watching, "watch", None) is not None:
        return _watched(_watching.watch, module, query, key, value, attention_mask, keywords), None
    if current_context() is None:
        result: tuple[Tensor, Tensor | None] = _original_attention(module)(module, query, key, value, attention_mask, **keywords)
        return result
    if module not in _patched:
        raise ContextError(f"{type(module).__name__} is not part of a patched model; enter paged_attn.patch(model) first")
    if attention_mask is not None:
        raise UnsupportedError(_NO_MASK)
    return _paged(module, query, key, value, keywords), None


def _paged(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> Tensor:
    """[1, T, heads, v_dim] for the context's batch."""
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnsupportedError(
            f"{type(module).__name__} was given queries of {query.shape[0]} rows of {query.shape[2]} tokens and keys of {key.shape[2]}; "
            "under a forward context the pages hold what came before: call model(**batch.model_inputs()), without a cache"
        )
    patched, layer_id = _patched[module]
    rows, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
    output = rows.new_empty(rows.shape[0], rows.shape[1], values.shape[-1])
    UNIFIED_ATTENTION(rows, keys, values, output, layer_id, patched.layers[layer_id].kv_layer == layer_id, sinks=keywords.get("s_aux"))
    return output[None]


def _watched(watch: Watch, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
    """The paged attention or, outside contexts, the module's original one, with `watch` applied to inputs and output."""
    _, layer_id = _patched[module]
    dtype = query.dtype
    query, key, value = watch.given(layer_id, query, key, value)
    if isinstance(sinks := keywords.get("s_aux"), Tensor):
        watch.sinks[layer_id] = sinks
    if watch.without_attention:
        output = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    elif current_context() is not None:
        output = _paged(module, query, key, value, keywords)
    else:
        if watch.wide is not None:
            query, key, value = (tensor.to(watch.wide) for tensor in (query, key, value))
            mask = mask.to(watch.wide) if isinstance(mask, Tensor) and mask.is_floating_point() else mask
        output = _original_attention(module)(module, query, key, value, mask, **keywords)[0]
    return watch.output(layer_id, output).to(dtype)


def _record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: dict[str, Any]) -> Tensor:
    model, names, found, given = _recording.state
    where = names.get(module, type(module).__name__)
    if module in found:
        raise UnsupportedError(
            f"layer at {where} attends more than once in one forward, and paged_attn.patch keeps one KV for each layer; "
            "use torch.compile(model, backend='paged_attn')"
        )
    scaling, window = keywords.pop("scaling", None), keywords.pop("sliding_window", None)
    softcap, sinks = keywords.pop("softcap", None), keywords.pop("s_aux", None)
    causal = keywords.pop("is_causal", None)
    if keywords.pop("dropout", 0.0):
        raise UnsupportedError(f"layer at {where} has attention dropout; call model.eval() first")
    unknown = sorted(name for name, value in keywords.items() if value is not None and name not in _SILENT)
    if unknown:
        raise UnsupportedError(
            f"layer at {where} passes {', '.join(unknown)} to its attention; paged_attn does not know what that changes and never drops it"
        )
    if mask is not None and not isinstance(mask, ProvedMask):
        raise UnsupportedError(
            f"layer at {where} builds its own mask instead of using transformers' mask interface; "
            "use torch.compile(model, backend='paged_attn')"
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"layer at {where}: {query.shape[2]} queries attend to {key.shape[2]} keys, so the call brings a cache or another sequence of "
            "its own (prefix tuning, an encoder), which a paged batch does not have"
        )
    own = causal if causal is not None else getattr(module, "is_causal", True)
    family = mask.family if mask is not None else MaskFamily(bool(own))
    if window is not None and window != family.window:
        raise UnsupportedError(f"layer at {where} asks for a sliding window of {window}, but its mask is {family.describe()}")
    check_declared(model, where, family, mask is not None)
    # Gemma 3n's last layers read an earlier layer's keys and values: the same tensors, not written to in between.
    kv = (id(key), key._version, id(value), value._version)
    given.append((kv, key, value))  # kept alive, so that ids stay unique
    owner = next(i for i, (other, *_) in enumerate(given) if other == kv)
    found[module] = AttentionSpec(
        num_q_heads=query.shape[1], num_kv_heads=key.shape[1], qk_head_dim=query.shape[3], v_head_dim=value.shape[3],
        scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5, causal=family.causal, sliding_window=family.window,
        window_ahead=family.ahead, chunk=family.chunk, softcap=softcap, has_sinks=sinks is not None, kv_layer=owner, module=where,
    )  # fmt: skip
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
