"""All settings of the engine in one frozen dataclass; command-line flags and PAGED_ATTN_* variables derive from it."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paged_attn.attn_ops.switches import OFF, ON
from paged_attn.engine.sampling_params import INTO_PARAMS
from paged_attn.engine.setting_names import (
    GONE,
    NEW_NAMES,
    OF_LLM,
    OTHER_SETTING,
    PREFIX,
    SAME_SETTING,
    renamed,
    warn_of_unknown_variables,
    with_hint,
)
from paged_attn.passes.optional import check_disabled


def _setting(default: Any, help: str, low: float | None = None, choices: tuple[str, ...] = (), advanced: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "choices": choices, "advanced": advanced})


_advanced = functools.partial(_setting, advanced=True)  # few people need it: listed after the others


STEP_TOKENS = 2048
CUDA_STEP_TOKENS = 8192  # larger steps have more throughput, but delay other requests' tokens
MANY_EXPERTS = 32  # per chosen expert: with 8,192 tokens each gets at most 256, and reading its weights takes longer
MANY_EXPERTS_STEP_TOKENS = 16_384
LORAS = 8  # adapters that there is room for, if some are given and more may come
OF_THE_GRAPH = ("inductor", "merge_linears", "gemv", "pdl")  # they change the graph: True is an error with compile=False


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Each has a flag (`--page-size`) and an environment variable (`PAGED_ATTN_PAGE_SIZE`).

    Raises:
        ValueError or TypeError: a value out of range or of the wrong type, named.
    """

    page_size: int = _setting(16, "tokens per KV page", 1)
    num_pages: int | None = _setting(
        None, "pages in the KV pool, page 0 included, whatever kv_memory_gib is; default: as many as fit kv_memory_gib", 2
    )
    kv_memory_gib: float | None = _setting(
        None,
        "GiB for KV pages and recurrent states, divided by what requests need of each; default: 0.25 on CPU, on a GPU 80 % of what weights "
        "and graphs leave",
        0,
    )
    max_batch_tokens: int | None = _setting(
        None,
        "token budget of one step; longer prompts are prefilled in chunks; default: 2048, for LLM on CUDA 8192, or 16384 with very "
        "many experts",
        1,
    )
    max_requests: int = _setting(256, "requests that run at the same time", 1)
    max_model_len: int | None = _advanced(
        None, "a request is no longer than if the model had so many positions; default: as many as it has, and the pool has room for", 1
    )
    overlap: bool | None = _advanced(
        None,
        "launch a step before the tokens of the one before it are known, so that the GPU never waits for the host; default: on CUDA only",
    )
    policy: str = _advanced(
        "fcfs",
        "who of one namespace and priority is admitted next: fcfs (first come, first served) or lpm (longest cached prefix first)",
        choices=("fcfs", "lpm"),
    )
    prefix_wait_tokens: int = _advanced(
        128, "a request waits for one that computes at least so many tokens of the same prefix, and then shares them; 0: never", 0
    )
    state_snapshots: int | None = _advanced(
        None,
        "recurrent states kept for shared prefixes at most, in slots that requests leave, 0: none is reused; default: as many as are free",
        0,
    )
    snapshot_interval: int = _advanced(
        1024,
        "tokens between the recurrent states that a long prompt leaves beside that at its end, more where it would leave over an eighth of "
        "state_snapshots; 0: none",
        0,
    )
    layer_groups: bool = _advanced(
        True, "layers with a window or chunks have page tables of their own and give back pages that no token to come sees"
    )
    prefix_cache: bool = _setting(True, "reuse the KV of shared prefixes")
    backend: str = _setting("auto", "attention backend: auto, a name that `paged-attn backends` lists, or two as prefill,decode")
    experts_backend: str = _advanced("auto", "what computes layers of experts: auto, or a name that `paged-attn backends` lists for them")
    scans_backend: str = _advanced("auto", "what computes recurrences: auto, or a name that `paged-attn backends` lists for them")
    state_dtype: str = _advanced(
        "auto",
        "what recurrent states of a model in 16 bits are kept in: auto is its own dtype, float32 for most; 16 bits take half of the "
        "memory and of the time to read and write it, and are rounded at every step",
        choices=("auto", "bfloat16", "float16"),
    )
    deterministic: bool = _setting(
        False, "take only batch-invariant attention: a row's attention is bitwise the same whatever else is in the batch"
    )
    threads: int | None = _setting(
        None, "threads that PyTorch computes a step with on a CPU; default: as many as are fastest, found by trying", 1
    )
    compile: bool = _setting(True, "trace the model and rewrite its graph; off: hook transformers' attention (no torch.compile)")
    inductor: bool | None = _advanced(None, "compile the pieces between attentions with Inductor; default: on CUDA only")
    merge_linears: bool | None = _advanced(
        None, "one matrix product for q, k and v, one for gate and up; their parameters become views of one tensor; default: on CUDA only"
    )
    gemv: bool | None = _advanced(
        None, "a kernel of our own for matrix products with a single row, and graphs for steps of one request; default: on CUDA only"
    )
    disable_passes: tuple[str, ...] = _setting(
        (), "optional passes that are left out whatever else is set, by the names that `paged-attn passes` lists"
    )
    early_logits_gather: bool = _advanced(
        True, "after the last attention compute only the tokens whose logits are wanted, where that is proved to change nothing"
    )
    graphs: str = _setting(
        "auto",
        "capture steps in CUDA graphs: full (decode whole, other steps piecewise), piecewise, off; auto: full on CUDA",
        choices=("auto", "full", "piecewise", "off"),
    )
    pdl: bool | None = _advanced(
        None,
        "Inductor's kernels start before the one in front has ended and wait for it first of all, on GPUs that can (compute capability "
        "9.0); default: if steps are captured",
    )
    graph_sampling: bool = _advanced(
        True, "choose each row's most likely token inside the graphs, so that a greedy step ends with one copy"
    )
    graph_memory_gib: float = _advanced(1.0, "device memory that all captured graphs may take, in GiB", 0)
    graph_decode_sizes: int = _advanced(35, "how many sizes of decode steps are captured, up to max_requests", 1)
    graph_extend_sizes: int = _advanced(20, "how many sizes of other steps are captured, up to 2048 tokens", 1)
    graph_strict: bool = _advanced(False, "a shape that cannot be captured is an error and not run uncaptured")
    graph_verify: bool = _advanced(False, "compare every captured step with the model uncaptured (slow)")
    follow_generate: bool = _advanced(
        False, "serve a model whose generate() numbers positions otherwise than a plain call as generate() does"
    )
    generation_config: str = _setting(
        "auto",
        "what a request does not state: auto is as the checkpoint's generation_config says, ours leaves that out (its end tokens count)",
        choices=("auto", "ours"),
    )
    max_loras: int = _advanced(0, "adapters that may be loaded at the same time, for requests to choose from; 0: none", 0)
    max_lora_rank: int = _advanced(16, "the largest rank of such an adapter; memory is taken for max_loras of them", 1)
    self_check: bool = _setting(True, "compare the rewritten model with the original before the first batch")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            allowed = _types(str(setting.type))
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                raise TypeError(f"{setting.name} is {value!r}; allowed is {setting.type}: {setting.metadata['help']}")
            low = setting.metadata["low"]
            if low is not None and value is not None and not value >= low:
                raise ValueError(f"{setting.name} is {value}; allowed are values of at least {low}: {setting.metadata['help']}")
            choices = setting.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{setting.name} is {value!r}; allowed are {' and '.join(map(repr, choices))}: {setting.metadata['help']}")
        check_disabled(self.disable_passes)
        if not self.compile and (asked := [f"{name}=True" for name in OF_THE_GRAPH if getattr(self, name)]):
            raise ValueError(
                f"{', '.join(asked)} with compile=False: that needs the model's graph, and with eager breaks none is traced; "
                "leave one of them out"
            )

    @property
    def step_tokens(self) -> int:
        """`max_batch_tokens`, or its default where the device is not known yet."""
        return STEP_TOKENS if self.max_batch_tokens is None else self.max_batch_tokens

    def resolved(self, *, cuda: bool, has_triton: bool) -> EngineConfig:
        """Every setting whose default depends on the device, decided. An engine does this once; nothing changes them later.

        Args:
            cuda: the model lies on a GPU.
            has_triton: kernels of our own can run there.
        """
        traced = cuda and self.compile
        defaults: dict[str, Any] = {
            "max_batch_tokens": CUDA_STEP_TOKENS if cuda else STEP_TOKENS,
            "overlap": cuda,
            "inductor": traced,
            "merge_linears": traced,
            "gemv": traced and has_triton,
            "pdl": traced and self.graphs != "off",
        }
        decided: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, graphs="full" if self.graphs == "auto" else self.graphs, **decided)

    @classmethod
    def from_environment(cls, **given: Any) -> EngineConfig:
        """Settings from PAGED_ATTN_* variables, overridden by `given`. One that is not a setting is warned about.

        Raises:
            ValueError: an unknown setting in `given`, listing the known ones; or a variable that does not parse or is out of range, named.
        """
        settings = renamed(given)
        variables = {f"{PREFIX}{name.upper()}": name for name in (*NEW_NAMES, *(setting.name for setting in fields(cls)))}
        warn_of_unknown_variables(variables)
        values = {
            name: cls._of_variable(name, variable)
            for variable, name in variables.items()
            if variable in os.environ and NEW_NAMES.get(name, name) not in settings
        }
        return cls(**{**values, **settings})

    @classmethod
    def _of_variable(cls, name: str, variable: str) -> Any:
        """Raises ValueError, which names the variable: it does not parse, or is out of range."""
        new = NEW_NAMES.get(name, name)
        try:
            value = parse_setting(new, os.environ[variable])
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # told when all settings are put together
                cls(**{new: value})
        except ValueError as error:
            raise ValueError(f"the environment variable {variable}: {error}") from error
        return value

    def with_(self, **given: Any) -> EngineConfig:
        """A copy with some settings changed; an unknown one raises ValueError."""
        return replace(self, **renamed(given))

    def with_adapters(self, count: int) -> EngineConfig:
        """With room for so many adapters, unless `max_loras` is set."""
        return self if self.max_loras else self.with_(max_loras=count)


_with_new_names = EngineConfig.__init__


@functools.wraps(_with_new_names)
def _with_old_names_too(self: EngineConfig, *args: Any, **given: Any) -> None:
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in renamed(given).items()}
    known = [setting.name for setting in fields(EngineConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        names = [with_hint(name, [*known, *SAME_SETTING, *OF_LLM], {**INTO_PARAMS, **OTHER_SETTING}) for name in unknown]
        raise ValueError(f"unknown engine setting {', '.join(names)}; known: {', '.join(known)}")
    _with_new_names(self, *args, **settings)


EngineConfig.__init__ = _with_old_names_too  # type: ignore[method-assign]


def parse_setting(name: str, text: str) -> Any:
    """A setting from a flag's or a variable's text; "none" stands for None. Raises ValueError: naming the setting, the text and what is
    allowed."""
    kind = {**{setting.name: str(setting.type) for setting in fields(EngineConfig)}, **dict.fromkeys(GONE, "bool")}[name]
    types = _types(kind)
    if text.lower() == "none" and type(None) in types:
        return None
    if bool in types:
        if text.lower() in (*ON, *OFF):
            return text.lower() in ON
    elif str in types:
        return text
    elif tuple in types:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    else:
        number = float if float in types else int
        try:
            return number(text)
        except ValueError:
            pass
    allowed = f"{', '.join((*ON, *OFF))}" + (" and none" if type(None) in types else "") if bool in types else kind
    raise ValueError(f"{name} is {text!r}; allowed is {allowed}")


def _types(kind: str) -> tuple[type, ...]:
    names: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (float, int),
        "bool": (bool,),
        "str": (str,),
        "None": (type(None),),
        "tuple[str, ...]": (tuple,),
    }
    return tuple(t for name in kind.split(" | ") for t in names[name])
