"""An attention backend of your own: what it can run as data, a plan per step, and F.scaled_dot_product_attention for each request.

The contract is `paged_attn.backends.attention.base`. `register_backend` holds for this process; a package declares an entry point instead,
`mine = "my_package:MyBackend"` under `[project.entry-points."paged_attn.backends"]`.
"""

from dataclasses import dataclass
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn import LLM, Batch, KVPool, SamplingParams, register_backend
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import Capabilities, Feature

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
PROMPTS = ["It was", "Mr. Knightley had never before seen her", "She had never in her life been so " * 8]


@dataclass
class Plan:
    """What all layers of a step share; of each request its rows of the batch, its pages, and how many tokens it has after the step."""

    batch: Batch
    pool: KVPool
    slots: tuple[Tensor, Tensor]  # of the new tokens: page, and place in the page
    requests: list[tuple[slice, Tensor, int]]


class MyBackend(AttentionBackend):
    name = "mine"
    # A model that asks for more (a softcap, sinks, ...) is refused with the reason, and nothing of it has to be looked at below.
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}), dtypes=DTYPES, kv_dtypes=DTYPES, features=frozenset({Feature.WINDOW}), note="an example"
    )

    def plan(self, batch: Batch, pool: KVPool) -> Plan:
        slots, requests, row = batch.slots[: batch.num_tokens], [], 0
        for pages, new, length in zip(batch.page_table, batch.query_lens_host, batch.seq_lens_host, strict=True):
            requests.append((slice(row, row + new), pages[: -(-length // batch.page_size)], length))
            row += new
        return Plan(batch, pool, (slots // batch.page_size, slots % batch.page_size), requests)

    def write_kv(self, plan: Plan, call: AttentionCall) -> None:
        for pages, new in ((plan.pool.key(call.layer_id), call.key), (plan.pool.value(call.layer_id), call.value)):
            pages[plan.slots] = new[: plan.batch.num_tokens].to(pages.dtype)  # what follows is padding

    def forward_extend(self, plan: Plan, call: AttentionCall) -> None:
        for rows, pages, length in plan.requests:
            query = call.query[rows].transpose(0, 1)  # [heads, new tokens, dim]
            key, value = (
                kv(call.layer_id)[pages].flatten(0, 1)[:length].transpose(0, 1).to(query.dtype) for kv in (plan.pool.key, plan.pool.value)
            )
            positions = torch.arange(length, device=query.device)
            distance = positions[length - query.shape[1] :, None] - positions
            mask = (distance >= 0) & (distance < (call.spec.sliding_window or length))
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.spec.scale, enable_gqa=True)
            call.output[rows] = output.transpose(0, 1)

    def forward_decode(self, plan: Plan, call: AttentionCall) -> None:
        self.forward_extend(plan, call)  # one new token per request: where a kernel of its own would pay


def main() -> list[list[int]]:
    register_backend("mine", MyBackend)
    tokens = {}
    for name in ("torch_native", "mine"):
        with LLM(files("paged_attn.demo_model"), dtype=torch.float32, backend=name) as llm:
            assert llm.engine.selection.backend.name == name
            tokens[name] = [completion.token_ids for completion in llm.generate(PROMPTS, SamplingParams(max_new_tokens=40))]
    assert tokens["mine"] == tokens["torch_native"]
    print(f"{sum(map(len, tokens['mine']))} tokens are the same with both backends")
    return tokens["mine"]


if __name__ == "__main__":
    main()
