"""What tests/test_tensor_parallel.py runs in two processes: each case makes what it needs, and returns what this rank saw.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.two_ranks OUT CASE...   writes OUT.0 and OUT.1
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paged_attn import LLM, SamplingParams
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors
from paged_attn.engine.lead import first_rank_leads
from paged_attn.engine.memory.budget import MemoryBudget
from paged_attn.engine.memory.grouped_kv import GroupedKVManager
from paged_attn.graph_cache.entries import VARIABLE, Entries
from paged_attn.parallel.local_model import served_locally
from paged_attn.parallel.shard import shard
from paged_attn.passes.positions import independent_rows
from tests.oracle import random_prompts
from tests.tiny_models import build
from tests.versions import NEWEST

RANK = int(os.environ.get("RANK", 0))
PROMPTS = random_prompts((5, 37, 1, 18, 30))
PROMPTS.append(PROMPTS[1][:20] + PROMPTS[3])  # shares five pages with another
GREEDY = SamplingParams(max_new_tokens=8)
SETTINGS: dict[str, Any] = {"page_size": 4, "num_pages": 96, "max_requests": 4, "max_batch_tokens": 24}


def whole(name: str, **overrides: Any) -> Any:
    model = build(name, **{"tie_word_embeddings": False, "num_hidden_layers": 2, **overrides})
    generator = torch.Generator().manual_seed(4)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # zero as it was made
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def sharded(name: str, plan: dict[str, str] | None = None, *, expert_parallel: bool = False, **overrides: Any) -> Any:
    """A tiny model over both ranks; `plan` changes styles, and None takes one out."""
    model = whole(name, **overrides)
    changed = {**model._tp_plan, **(plan or {})}
    model._tp_plan = {key: style for key, style in changed.items() if style is not None}
    return shard(model, expert_parallel=expert_parallel)


def tokens_of(model: Any, prompts: list[list[int]] = PROMPTS, params: Any = GREEDY, **settings: Any) -> list[list[int]]:
    with LLM(model, **{**SETTINGS, **settings}) as llm:
        return [completion.token_ids for completion in llm.generate(prompts, params)]


def error_of(run: Callable[[], Any]) -> list[str]:
    """The type and the text of the error that `run` must raise."""
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("no error was raised")


def served(name: str, compiled: bool) -> dict[str, Any]:
    """Twice, so that the second run begins with a warm prefix cache."""
    with LLM(sharded(name), **{**SETTINGS, "compile": compiled, "overlap": compiled}) as llm:
        runs = [[completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] for _ in range(2)]
        heads = [[spec.num_q_heads, spec.num_kv_heads] for spec in llm.engine.runner.layers]
        return {"runs": runs, "heads": heads, "cached": llm.engine.stats.cached_tokens, "pool heads": llm.engine.pool.key(0).shape[2]}


def captured(model: Any = None) -> dict[str, Any]:
    """Rewritten, and recorded on a tape, collectives included."""
    from tests.engine.steps.test_captured_steps import captured_engine, modes_of, tokens_of

    engine = captured_engine(model or sharded("qwen3"), overlap=True)
    modes = modes_of(engine)
    tokens = tokens_of(engine, PROMPTS)
    engine.close()
    return {"tokens": tokens, "modes": sorted(set(modes))}


def unequal_budgets() -> dict[str, Any]:
    """On rank 1 graphs take more memory, so that fewer fit."""
    from tests.capture.tape import TapeRecorder
    from tests.engine.steps.test_captured_steps import captured_engine, modes_of, tokens_of

    recorder = TapeRecorder(bytes_per_graph=1000 * (1 + RANK))
    engine = captured_engine(sharded("llama"), recorder=recorder, compile=False, graph_memory_gib=12_000 / 2**30)
    assert engine.step_runner.graphs is not None
    keys, modes = sorted(map(str, engine.step_runner.graphs.captured)), modes_of(engine)
    refused = sorted(map(str, engine.step_runner.graphs.refused))
    tokens = tokens_of(engine, PROMPTS)
    engine.close()
    return {"captured": keys, "refused": refused, "modes": modes, "tokens": tokens}


def fewer_on_rank_1() -> Any:
    pages = MemoryBudget.pages
    return mock.patch.object(MemoryBudget, "pages", lambda self, kept_free=0: pages(self, kept_free) - 17 * RANK)


def unequal_memory() -> int:
    with fewer_on_rank_1(), LLM(sharded("llama"), **{**SETTINGS, "compile": False}) as llm:
        return llm.engine.pool.num_pages


WINDOWS_TOKENS = 40
LONG_PROMPTS = random_prompts((50, 21, 64, 9, 38, 57), seed=12)
LONG_PROMPTS.append(LONG_PROMPTS[2][:44] + PROMPTS[0])


def windows(name: str, compiled: bool) -> dict[str, Any]:
    """Layers of a window of 8 beside layers that keep all, where memory is wanted all the time and rank 1 has less of it; and what the
    ranks' books say then."""
    given_back: list[int] = []
    unmap = GroupedKVManager.free_unneeded

    def counting(self: GroupedKVManager, *, to_start: bool = True) -> None:
        before = self.allocator.num_free_frames
        unmap(self, to_start=to_start)
        given_back.append(self.allocator.num_free_frames - before)

    settings = {**SETTINGS, "num_pages": 50, "compile": compiled, "overlap": compiled}
    params = SamplingParams(max_new_tokens=WINDOWS_TOKENS)
    model = sharded(name, num_hidden_layers=4, sliding_window=8)
    with mock.patch.object(GroupedKVManager, "free_unneeded", counting), fewer_on_rank_1(), LLM(model, **settings) as llm:
        runs = [[completion.token_ids for completion in llm.generate(LONG_PROMPTS, params)] for _ in range(2)]
        kv, pool = llm.engine.kv, llm.engine.pool
        assert isinstance(kv, GroupedKVManager)
        return {
            "runs": runs, "keeps": [group.keeps.describe() for group in pool.groups], "pool heads": pool.key(0).shape[2],
            "frames": pool.num_pages, "given back": given_back, "table": kv.frames.tolist(), "steps": llm.engine.stats.steps,
            "preemptions": llm.engine.scheduler.stats.preemptions,
        }  # fmt: skip


def sampling() -> dict[str, Any]:
    """Without seeds, and with what is drawn pushed apart on rank 1."""
    drawn = SamplingParams(max_new_tokens=8, temperature=1.5)
    model = sharded("llama")
    from paged_attn.engine.sampling import sampler

    draw = sampler.sample_tokens

    def otherwise(logits: torch.Tensor, best: torch.Tensor, of: SamplingTensors) -> torch.Tensor:
        return (draw(logits, best, of) + RANK) % logits.shape[-1]

    free = tokens_of(model, [PROMPTS[0]] * 3, drawn, compile=False)
    with mock.patch.object(sampler, "sample_tokens", otherwise):
        pushed = [tokens_of(model, [PROMPTS[0]] * 2, drawn, compile=False, overlap=overlap) for overlap in (False, True)]
    return {"free": free, "pushed": pushed}


@contextlib.contextmanager
def noise_on_rank_1(module: nn.Module) -> Iterator[None]:
    """As if its sums rounded otherwise, only more so."""

    def add(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * RANK * torch.arange(output.shape[-1])

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def equal_logits() -> dict[str, Any]:
    """Of a model whose head is whole on both ranks, when the ranks' hidden states differ; and with a head that is sharded."""
    result = {}
    ids = torch.tensor([PROMPTS[1]])
    for name, plan in {"whole head": {"lm_head": None}, "sharded head": {}}.items():
        model = sharded("llama", plan)
        with torch.no_grad(), served_locally(model), noise_on_rank_1(model.model.norm):
            logits = model(ids).logits
        result[name] = logits.flatten()[::7].tolist()
    return result


def left_as_found() -> dict[str, Any]:
    """Merged parameters move; the DTensors hold what moved, and transformers' forwards are back."""
    model = sharded("llama")
    ids = torch.tensor([PROMPTS[1]])
    before = {name: (type(p).__name__, p.shape) for name, p in model.named_parameters()}
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with torch.no_grad():
        logits = model(ids).logits
    llm = LLM(model, **SETTINGS, merge_linears=True)
    second = LLM(model, **SETTINGS, compile=False)  # shares the rank's modules
    tokens = llm.generate(PROMPTS, GREEDY)
    merges = len(llm.engine.runner.compiled.rewrite.merges)
    llm.close()
    still = not any(isinstance(p, DTensor) for p in model.parameters())
    again = second.generate(PROMPTS, GREEDY)
    second.close()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        after = model(ids).logits
    return {
        "same types": before == {name: (type(p).__name__, p.shape) for name, p in model.named_parameters()},
        "same forwards": forwards == {name: vars(module).get("forward") for name, module in model.named_modules()},
        "same logits": torch.equal(logits, after), "local while another engine serves": still,
        "tokens": [[completion.token_ids for completion in each] for each in (tokens, again)], "merges": merges,
        "one memory": len({getattr(attention, f"{n}_proj").weight.to_local().untyped_storage().data_ptr() for n in "qkv"}) == 1,
    }  # fmt: skip


def tied() -> dict[str, Any]:
    """The head is the table of tokens, or was: where one of them alone is cut, each rank keeps both."""
    model = sharded("qwen3", tie_word_embeddings=True)
    same = model.lm_head.weight is model.model.embed_tokens.weight
    parted = sharded("qwen3", {"model.embed_tokens": None}, tie_word_embeddings=True)
    return {"same": same, "parted": parted.lm_head.weight is not parted.model.embed_tokens.weight,
            "tokens": [tokens_of(each, compile=False) for each in (model, parted)]}  # fmt: skip


def uneven_vocabulary() -> list[list[int]]:
    return tokens_of(sharded("llama", vocab_size=97), compile=False)


def unequal_shares() -> list[list[int]]:
    """Rank 1 might look at more tokens at once, as if it had fewer weights."""
    with mock.patch.object(independent_rows, "MOST_TOKENS", 100 + 50 * RANK):
        return tokens_of(sharded("llama"))


def other_styles() -> dict[str, Any]:
    """Styles that no tiny model's own plan has."""
    result = {}
    plans: dict[str, dict[str, Any]] = {
        "gathered": {"model.layers.*.mlp.up_proj": "colwise_gather_output", "model.layers.*.mlp.gate_proj": "colwise_gather_output",
                     "model.layers.*.mlp.down_proj": None},
        "attention whole": {f"model.layers.*.self_attn.{name}_proj": None for name in "qkvo"},
    }  # fmt: skip
    if NEWEST:  # 5.17 does not know these styles
        plans["embedding by columns"] = {"model.embed_tokens": "embedding_colwise"}
        plans["split input"] = {"model.layers.*.mlp.gate_proj": "replicate", "model.layers.*.mlp.up_proj": "replicate",
                                "model.layers.*.mlp.down_proj": "rowwise_split_input"}  # fmt: skip
    for name, plan in plans.items():
        result[name] = tokens_of(sharded("llama", plan), compile=False)
    return result


def biases() -> list[list[int]]:
    return tokens_of(sharded("llama", attention_bias=True, mlp_bias=True), compile=False)


def read_in_shards(name: str = "llama", **config: Any) -> list[list[int]] | None:
    """As users load models; None where accelerate is missing, which transformers needs for it."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        if RANK == 0:
            whole(name).save_pretrained(folder)
        dist.broadcast_object_list(where)
        shares = DistributedConfig(**(config or {"tp_plan": "auto"}))
        model = AutoModelForCausalLM.from_pretrained(where[0], distributed_config=shares, dtype=torch.float32).eval()
        dist.barrier()
    return tokens_of(model, compile=False)


def led() -> dict[str, Any]:
    """Rank 0 alone is asked: several calls, one that is refused, one that is left half-way; rank 1 repeats it all."""
    result: dict[str, Any] = {}
    with LLM(sharded("llama"), **SETTINGS, compile=False, overlap=True) as llm:
        with first_rank_leads(llm) as leads:
            if leads:
                result["first"] = [c.token_ids for c in llm.generate(PROMPTS[:3], GREEDY)]
                result["refused"] = error_of(lambda: llm.generate([[-1]], GREEDY))[0]
                stream = llm.stream(PROMPTS[3:5], GREEDY)
                next(stream)
                stream.close()
                result["second"] = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
                assert llm.clear_prefix_cache() > 0
        ended = {"steps": llm.engine.stats.steps, "left": len(llm.engine.requests), "free": llm.engine.kv.num_available}
        ended["still cached"] = llm.clear_prefix_cache()
        together = [c.token_ids for c in llm.generate(PROMPTS[:2], GREEDY)]
        with first_rank_leads(llm) as leads:
            if leads:
                llm.close()
        ended["closed"] = llm.closed
    return {"leader": result, "ended": ended, "together": together, "skips trial": llm.engine.input_processor.guides.skips_trial}


def cached_graphs(model: Any = None) -> dict[str, Any]:
    """Traced; found on disk by both ranks; and found by rank 0 alone, so that both trace."""
    model, runs = model or sharded("llama"), []
    finds_nothing = mock.patch.object(Entries, "read", lambda entries, key: iter(()))
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        dist.broadcast_object_list(where)
        with mock.patch.dict(os.environ, {VARIABLE: where[0]}):
            for patched in (contextlib.nullcontext(), contextlib.nullcontext(), finds_nothing if RANK == 1 else contextlib.nullcontext()):
                with patched, LLM(model, **SETTINGS) as llm:
                    found = "loaded from disk" in llm.engine.runner.compiled.rewrite.seconds
                    runs.append([found, [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]])
        dist.barrier()
        files = len(list(pathlib.Path(where[0]).rglob("*.graph")))
        dist.barrier()
    return {"runs": runs, "files": files}


def example() -> list[str]:
    from examples import tensor_parallel

    model, tokenizer = tensor_parallel.load(None, torch.device("cpu"))
    with LLM(model, tokenizer=tokenizer, compile=False) as llm:
        assert llm.engine.runner.ranks is not None
        return [completion.text for completion in llm.generate(tensor_parallel.PROMPTS, tensor_parallel.PARAMS)]


def divergence() -> dict[str, Any]:
    model = sharded("llama")
    errors = {"settings": error_of(lambda: tokens_of(model, compile=False, page_size=4 * (1 + RANK)))}
    other = [*PROMPTS[0][:-1], PROMPTS[0][-1] ^ RANK]
    errors["prompt"] = error_of(lambda: tokens_of(model, [other], compile=False))
    errors["number of requests"] = error_of(lambda: tokens_of(model, PROMPTS[: 2 + RANK], compile=False))
    params = [GREEDY, SamplingParams(max_new_tokens=3 + RANK)]
    errors["parameters"] = error_of(lambda: tokens_of(model, PROMPTS[:2], params, compile=False))
    return errors


def refusals() -> dict[str, Any]:
    def make(name: str, plan: dict[str, str] | None = None, **overrides: Any) -> list[str]:
        model = sharded(name, plan, **overrides)
        error = error_of(lambda: LLM(model, **SETTINGS, compile=False))
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            raise AssertionError("the refused model is not as it was found")
        return error

    errors = {
        "cut heads": make("llama", num_key_value_heads=1),
        "logits in slices": make("llama", {"lm_head": "colwise"}),
        "unknown style": make("llama", {"model.norm": "sequence_parallel"}),
    }
    model = sharded("llama")
    model.config.distributed_config = {"tp_size": 2, "fsdp_size": 2}
    errors["other sharding"] = error_of(lambda: LLM(model, **SETTINGS, compile=False))
    return errors


def one_rank_leaves() -> list[str]:
    """The last case: rank 1 ends, and rank 0 says so instead of waiting."""
    llm = LLM(sharded("llama"), **SETTINGS, compile=False)
    if RANK == 1:
        return []
    return error_of(lambda: llm.generate(PROMPTS[:1], GREEDY))


CASES: dict[str, Callable[[], Any]] = {
    "llama hooked": lambda: served("llama", False),
    "qwen3 hooked": lambda: served("qwen3", False),
    "qwen3_moe hooked": lambda: served("qwen3_moe", False),
    "qwen3_moe rewritten": lambda: served("qwen3_moe", True),
    "qwen3 rewritten and captured": captured,
    "llama rewritten and merged": left_as_found,
    "unequal budgets": unequal_budgets,
    "unequal memory": unequal_memory,
    "gemma3_text windows hooked": lambda: windows("gemma3_text", False),
    "gemma3_text windows rewritten": lambda: windows("gemma3_text", True),
    "sampling": sampling,
    "equal logits": equal_logits,
    "tied": tied,
    "uneven vocabulary": uneven_vocabulary,
    "unequal shares": unequal_shares,
    "other styles": other_styles,
    "biases": biases,
    "read in shards": read_in_shards,
    "led": led,
    "kept graphs": cached_graphs,
    "example": example,
    "divergence": divergence,
    "refusals": refusals,
    "one rank leaves": one_rank_leaves,
}


def main(out: str, cases: list[str], known: dict[str, Callable[[], Any]] = CASES) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for case in cases:
        started = time.perf_counter()
        results[case] = known[case]()
        results[f"seconds of {case}"] = round(time.perf_counter() - started, 2)
        with open(f"{out}.{RANK}", "w") as file:
            json.dump(results, file)
    if "one rank leaves" not in cases:
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
