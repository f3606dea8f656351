"""Finding a model's recurrent layers: modules that write tensors of a fixed size into the cache, whatever the number of tokens, or that are
given and give back such tensors where there is no cache.

Keys and values grow with the tokens and are attention's; a state does not. The model is run on two lengths to tell them apart, and
every layer that is found is then run by itself to see in which calls it can be trusted (`verify.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.attn_ops.specs.recurrent import StateSpec, slot_bytes
from paged_attn.calling.call_signature import plain_inputs, takes
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.recurrent.cache_state import CacheTemplate, Path, leaves_of, name_of, value_at
from paged_attn.recurrent.layer import KeptAttributes, RecurrentLayer, call_with_attributes
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import verified, verified_as
from paged_attn.recurrent.watching.attributes import attribute_states, calls_of, owners_of, without_unused
from paged_attn.recurrent.watching.call_parts import LONG, SHORT, NotDriven, Undefined, layer_of, refused
from paged_attn.recurrent.watching.carried import carried_layers
from paged_attn.recurrent.watching.not_read import without_unread
from paged_attn.recurrent.watching.watch import Call, Watched, is_cache, watch
from paged_attn.stopwatch import part

logger = logging.getLogger("paged_attn")
_PER_TOKEN = ("logits", "loss", "last_hidden_state", "hidden_states", "attentions")

InputsOf = Callable[[int], dict[str, Any]]


class GrowingState(NotDriven):
    """Modules keep tensors that grow with the tokens besides their states."""

    def __init__(self, growing: dict[str, list[str]]) -> None:
        why = (
            f"it keeps {' and '.join(next(iter(growing.values())))}, which grow with the tokens, besides its state. A request has a slot "
            "for tensors of a fixed size, and pages for the keys and values that attention reads; this is neither"
        )
        super().__init__(list(growing), why)


@contextmanager
def without_engine(model: nn.Module) -> Iterator[InputsOf]:
    """Inside, a model that no engine has traced can be run; yields a function: number of tokens -> arguments of a call."""
    device = model_device(model)
    with as_served(model), torch.compiler.set_stance("force_eager"):
        yield lambda length: plain_inputs(model, torch.arange(length, device=device) % 2 + 1, True)


@part("find recurrent layers")
def find_recurrent_layers(model: nn.Module, inputs_of: InputsOf, beside: Iterable[str] = ()) -> tuple[RecurrentLayer, ...]:
    """The recurrent layers of a model in evaluation mode, in execution order.

    Args:
        inputs_of: number of tokens -> keyword arguments of a call, in the form in which the model is captured.
        beside: modules that are not searched, nor what lies inside them.

    Raises:
        NotDriven: a layer with state cannot be run by itself; the message names it and the reason.
        Undefined: a layer's results token by token and for all tokens at once differ.
    """
    watched = _both_lengths(model, inputs_of)
    if watched is None:
        return ()
    inside = tuple(f"{name}." for name in beside)
    calls = [call for call in _recurrent_calls(*watched) if not f"{call.name}.".startswith(inside)]
    if growing := {call.name: kept for call in calls if (kept := _growing(call, *watched))}:
        raise GrowingState(growing)
    layers = _layers(calls, *watched)
    if watched[1].cache is None:
        layers = [layer for layer in carried_layers(model, inputs_of) if not f"{layer.spec.module}.".startswith(inside)]
    layers = _all_verified(layers)
    repeated = [layer.spec.module for layer in layers if sum(other.module is layer.module for other in layers) > 1]
    if repeated:
        raise refused(repeated[0], "it runs more than once in one call of the model, each time on another state")
    if layers:
        total = slot_bytes([layer.spec for layer in layers])
        logger.info("%d recurrent layers, %.1f KiB of state per request", len(layers), total / 2**10)
    return tuple(layers)


@part("find recurrent layers")
def find_attribute_layers(model: nn.Module, inputs_of: InputsOf) -> tuple[RecurrentLayer, ...]:
    """The outermost modules with state in plain attributes of their own or of submodules. Raises as `find_recurrent_layers`."""
    inputs = [{**inputs_of(length), "use_cache": True} for length in (SHORT, LONG)]
    owners = owners_of(attribute_states(*(watch(model, each).attributes for each in inputs)))
    short, long = (calls_of(model, each, owners) for each in inputs)
    return tuple(verified(_attribute_layer(name, paths, short[name], long[name])) for name, paths in owners.items())


def recurrent_modules(model: nn.Module, inputs_of: InputsOf) -> list[str]:
    """The paths of the modules that keep recurrent state in a cache, or return it, whether or not paged_attn can run them."""
    watched = _both_lengths(model, inputs_of)
    if watched is None:
        return []
    if watched[1].cache is None:
        return [layer.spec.module for layer in carried_layers(model, inputs_of)]
    return [call.name for call in _recurrent_calls(*watched)]


def refuse_recurrent(model: nn.Module, path: str, advice: str = "only paged_attn.LLM(model), which traces the model, has one") -> None:
    """Raises UnsupportedError if the model writes recurrent state into its own cache when it is run on a few tokens."""
    if not takes(model, "input_ids") or not hasattr(model, "get_input_embeddings"):
        return
    with without_engine(model) as inputs_of:
        found = recurrent_modules(model, inputs_of)
    if found:
        others = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise UnsupportedError(
            f"{type(model).__name__} keeps recurrent state in {found[0]}{others}, and {path} has no place for the state of several "
            f"requests; {advice}"
        )


def state_outside_layers(model: nn.Module, inputs_of: InputsOf) -> str:
    """Where a model keeps tensors of a fixed size per request other than in a transformers cache, or ""."""
    watched = _both_lengths(model, inputs_of)
    if watched is None:
        return ""
    short, long = watched
    kept = {f"the attribute {path}": value for path, value in long.attributes.items() if value.dim() > 1}
    others = {f"the attribute {path}": value for path, value in short.attributes.items()}
    for table, seen in ((kept, long), (others, short)):
        fields = vars(seen.output) if hasattr(seen.output, "__dict__") else {}
        for name in [n for n, value in fields.items() if n not in _PER_TOKEN and (value is not seen.cache or value is None)]:
            leaves = leaves_of(fields[name]).values()
            table |= {f"its output's {name}": value for value in leaves if isinstance(value, Tensor) and value.dim() > 1}
    found = [where for where, value in kept.items() if where in others and value.shape == others[where].shape]
    return found[0] if found else ""


def _recurrent_calls(short: Watched, long: Watched) -> list[Call]:
    """Calls of modules that write state themselves; for nested ones only the outer one, which runs both."""
    calls = [call for call in long.calls if _states(call.own, short, long)]
    return [call for call in calls if not any(call.name.startswith(f"{outer.name}.") for outer in calls)]


def _both_lengths(model: nn.Module, inputs_of: InputsOf) -> tuple[Watched, Watched] | None:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    config = getattr(model, "config", None)
    if config is None or not ("use_cache" in parameters or (takes_any and hasattr(config, "use_cache"))):
        return None
    short, long = (_watched(model, {**inputs_of(length), "use_cache": True}, length) for length in (SHORT, LONG))
    return short, long


def _watched(model: nn.Module, inputs: dict[str, Any], length: int) -> Watched:
    what = f"{type(model).__name__} itself cannot run a prompt of {length} tokens with use_cache=True"
    with model_code(lambda why: UnsupportedError(f"{what}: {why}")):
        return watch(model, inputs)


def _states(changed: set[Path], short: Watched, long: Watched) -> list[Path]:
    """Those paths at which both caches hold a tensor of the same shape."""
    few, many = short.leaves, long.leaves
    written = [path for path in changed if isinstance(many.get(path), Tensor) and isinstance(few.get(path), Tensor)]
    written = [path for path in written if not _of_window(path, long.cache)]
    return sorted((path for path in written if many[path].shape == few[path].shape and many[path].dim() > 0), key=str)


def _of_window(path: Path, cache: Any) -> bool:
    """Whether it holds keys or values of a sliding window: if short, it has as many after SHORT tokens as after LONG."""
    _, name = path[-1]
    return name in ("keys", "values") and bool(getattr(value_at(cache, path[:-1]), "is_sliding", False))


def _growing(call: Call, short: Watched, long: Watched) -> list[str]:
    """The other tensors that a module with state changes, whose size depends on the number of tokens."""
    many = long.leaves
    return sorted(name_of(path) for path in call.changed - {*_states(call.changed, short, long)} if isinstance(many.get(path), Tensor))


def _layers(calls: list[Call], short: Watched, long: Watched) -> list[RecurrentLayer]:
    layers, failed = [], list[NotDriven]()
    for call in calls:
        try:
            layers.append(_layer(call, short, long))
        except NotDriven as refusal:
            failed.append(refusal)
    if failed:
        raise NotDriven([refusal.modules[0] for refusal in failed], failed[0].why)
    return layers


def _layer(call: Call, short: Watched, long: Watched) -> RecurrentLayer:
    where, states = call.name, _states(call.changed, short, long)
    few, many = short.leaves, long.leaves
    for path in call.changed:
        if path in states:
            if many[path].shape[0] != 1:
                raise refused(where, f"its state {name_of(path)} has shape {tuple(many[path].shape)}; known is [batch, ...]")
        elif few.get(path) != many.get(path):
            raise refused(where, f"it counts in {name_of(path)}: {few.get(path)!r} after {SHORT} tokens, {many.get(path)!r} after {LONG}")
    earlier = next(c for c in short.calls if c.name == where)
    specs = [StateSpec(_short_name(path), tuple(many[path].shape[1:]), many[path].dtype) for path in states]
    template = CacheTemplate(long.fresh, long.cache, call.changed, states)
    return layer_of(call, earlier, specs, template, without_unread(call, earlier, template))


def _all_verified(layers: Sequence[RecurrentLayer]) -> list[RecurrentLayer]:
    """The layers; of each kind one is verified in all forms of calls, and of the others that their numbers agree with that."""
    known: dict[Hashable, RecurrentLayer] = {}
    found = []
    for layer in layers:
        kind = kind_of(layer)
        alike = verified_as(known[kind], layer) if kind in known else None
        found.append(alike or _verified(layer))
        known.setdefault(kind, found[-1])
    return found


def _verified(layer: RecurrentLayer) -> RecurrentLayer:
    where = layer.spec.module
    try:
        with model_code(lambda why: refused(where, f"without the layers before it, its own forward fails: {why}")):
            return verified(layer)
    except Undefined as undefined:
        if not layer.unused:
            raise
        names = " and ".join(sorted(layer.unused))
        raise refused(where, f"it may need {names}, which has no row per token: {undefined}") from undefined


def _attribute_layer(name: str, names: list[str], earlier: list[Call], calls: list[Call]) -> RecurrentLayer:
    if len(earlier) != 1 or len(calls) != 1:
        raise refused(name, f"it runs {len(calls)} times in one call of the model")
    (call,), paths = calls, [(("attribute", "values"), ("item", each)) for each in names]
    fresh, after = KeptAttributes(dict.fromkeys(names)), KeptAttributes(dict.fromkeys(names))
    call.arguments = {key: None if is_cache(value) else value for key, value in call.arguments.items()}
    unused = without_unused(call)
    with left_as_it_was(call.module):
        call.output = call_with_attributes(call.module, call.arguments, after)
    states = []
    for each, value in after.values.items():
        if not isinstance(value, Tensor) or value.shape[0] != 1:
            raise refused(name, f"its attribute {each} is {type(value).__name__}; known is a tensor [batch, ...]")
        states.append(StateSpec(each, tuple(value.shape[1:]), value.dtype))
    return layer_of(call, earlier[0], states, CacheTemplate(fresh, after, paths, paths), unused)


def _short_name(path: Path) -> str:
    """The end of a path, from its last attribute: `conv_states[0]`."""
    last = max((i for i, (kind, _) in enumerate(path) if kind == "attribute"), default=0)
    return name_of(path[last:])
