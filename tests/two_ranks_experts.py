"""What tests/test_expert_parallel.py runs in two processes, as tests/two_ranks.py does: each rank has some experts whole.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.two_ranks_experts OUT CASE...   writes OUT.0 and OUT.1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paged_attn import LLM
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.check import self_check
from paged_attn.check.compare.suspects import Suspect
from paged_attn.check.runs.steps import LONGEST
from paged_attn.check.runs.truth import LOGITS
from paged_attn.parallel.shard import distributed_config, shard
from tests.two_ranks import GREEDY, PROMPTS, RANK, SETTINGS, cached_graphs, captured, error_of, main, read_in_shards, sharded, tokens_of
from tests.zoo.build import build


def served(model: Any, compiled: bool = True) -> dict[str, Any]:
    """Twice, so that the second run begins with a warm prefix cache."""
    with LLM(model, **{**SETTINGS, "compile": compiled, "overlap": compiled}) as llm:
        runs = [[completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] for _ in range(2)]
        seen: dict[str, Any] = {"runs": runs, "heads": llm.engine.pool.key(0).shape[2] if llm.engine.runner.layers else 0}
        if compiled:
            nodes = llm.engine.runner.compiled.rewrite.gm.graph.nodes
            calls = [node for node in nodes if node.target is EXPERTS]
            seen["experts of a layer"] = [node.args[3].meta["example_value"].shape[0] for node in calls]
            seen["routers"] = sum(node.target is ROUTE for node in nodes)
    return seen


def tiny(name: str) -> Any:
    """Of the zoo, over both ranks."""
    return shard(build(name), expert_parallel=True)


def attention_whole(name: str) -> Any:
    """All but the experts is on both ranks."""
    model = build(name)
    model.tp_plan = {}
    return shard(model, expert_parallel=True)


def left_as_found() -> dict[str, bool]:
    model = tiny("gpt_oss")
    ids = torch.tensor([PROMPTS[1]])
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    with torch.no_grad():
        before = model(ids).logits
        with LLM(model, **SETTINGS) as llm:
            while_served = model(ids).logits
            llm.generate(PROMPTS[:1], GREEDY)
        after = model(ids).logits
    return {
        "same logits": torch.equal(before, after), "close while served": torch.allclose(before, while_served, atol=1e-4),
        "same forwards": forwards == {name: vars(module).get("forward") for name, module in model.named_modules()},
        "shards": all(isinstance(parameter, DTensor) for name, parameter in model.named_parameters() if ".experts." in name),
    }  # fmt: skip


def sent_tokens() -> list[str]:
    model = sharded("mixtral", expert_parallel=True)
    model.config.distributed_config.ep_implementation = "all_to_all"
    return error_of(lambda: LLM(model, **SETTINGS, compile=False))


def suspected_by_one_rank(off: float) -> list[Any]:
    """One row of the logits is off by so much on rank 1 alone, as where rounding chooses an expert otherwise that only rank 1 has."""
    original = self_check.compare_ragged

    def compared(served: Any, truth: Any, noise: Any) -> list[Suspect]:
        found = original(served, truth, noise)
        if RANK == 1:
            row = truth.rows(LONGEST, LOGITS)[3]
            found.append(Suspect(LOGITS, LONGEST, 3, 1.0, 0.01, row + off * row.norm(), "a planted step"))
        return found

    self_check.compare_ragged = compared
    try:
        return tokens_of(tiny("mixtral")) if off == 0 else error_of(lambda: LLM(tiny("mixtral"), **SETTINGS))
    finally:
        self_check.compare_ragged = original


CASES: dict[str, Callable[[], Any]] = {
    "qwen3_moe rewritten": lambda: served(sharded("qwen3_moe", expert_parallel=True)),
    "gpt_oss hooked": lambda: served(tiny("gpt_oss"), compiled=False),
    "deepseek_v3 rewritten": lambda: served(tiny("deepseek_v3")),
    "mixtral rewritten, attention whole": lambda: served(attention_whole("mixtral")),
    "recurrent layers whole": lambda: tokens_of(attention_whole("qwen3_next")),
    "recurrent layers cut": lambda: error_of(lambda: LLM(tiny("qwen3_next"), **SETTINGS)),
    "captured": lambda: captured(sharded("qwen3_moe", expert_parallel=True)),
    "cached graphs": lambda: cached_graphs(sharded("mixtral", expert_parallel=True)),
    "read in shards": lambda: read_in_shards("qwen3_moe", **vars(distributed_config(2, True))),
    "left as found": left_as_found,
    "sent tokens": sent_tokens,
    "one rank's suspect, explained": lambda: suspected_by_one_rank(0.0),
    "one rank's suspect": lambda: suspected_by_one_rank(1.0),
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES), CASES)
