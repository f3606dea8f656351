"""The reference: one query and one head at a time in float32, straight from the definition in `AttentionSpec`.

It shares no code with any other backend and is made to be read, not to be fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import Capabilities, Feature
from paged_attn.backends.needs import UP_TO_FLOAT64


@dataclass
class Plan:
    batch: Batch
    pool: KVPool


class ReferenceBackend(AttentionBackend):
    name = "reference"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=UP_TO_FLOAT64,
        kv_dtypes=UP_TO_FLOAT64,
        features=frozenset(
            {Feature.WINDOW, Feature.CHUNK, Feature.DUAL_CHUNK, Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.POSITION_BIAS,
             Feature.BIDIRECTIONAL, Feature.WINDOW_AHEAD, Feature.LSE, Feature.MLA, Feature.UNEQUAL_DIMS, Feature.DETERMINISTIC}
        ),
        note="the float32 oracle of the tests; slow",
    )  # fmt: skip

    def plan(self, batch: Batch, pool: KVPool) -> Plan:
        return Plan(batch, pool)

    def write_kv(self, plan: Plan, call: AttentionCall) -> None:
        for row, slot in enumerate(plan.batch.slots[: plan.batch.num_tokens].tolist()):
            page, offset = divmod(slot, plan.batch.page_size)
            plan.pool.key(call.layer_id)[page, offset] = call.key[row]
            plan.pool.value(call.layer_id)[page, offset] = call.value[row]

    def forward_decode(self, plan: Plan, call: AttentionCall) -> None:
        self.forward_extend(plan, call)  # a decode row extends by one token

    def forward_extend(self, plan: Plan, call: AttentionCall) -> None:
        batch, spec, sinks, row = plan.batch, call.spec, call.sinks, 0
        pool_keys, pool_values = plan.pool.key(call.layer_id), plan.pool.value(call.layer_id)
        for request in range(batch.num_requests):
            length = batch.seq_lens_host[request]
            pages = batch.page_table[request].tolist()
            slots = [(pages[j // batch.page_size], j % batch.page_size) for j in range(length)]
            for i in range(length - batch.query_lens_host[request], length):
                seen = [j for j in range(length) if _sees(spec, i, j)]
                if not seen:  # in a part of dual chunk attention; any log-sum-exp other than -inf would count in the merge
                    call.output[row] = 0.0
                    if call.lse_out is not None:
                        call.lse_out[row] = -math.inf
                    row += 1
                    continue
                keys = torch.stack([pool_keys[slots[j]] for j in seen]).float()
                values = torch.stack([pool_values[slots[j]] for j in seen]).float()
                for head in range(spec.num_q_heads):
                    kv_head = head // (spec.num_q_heads // spec.num_kv_heads)
                    scores = spec.scale * (keys[:, kv_head] @ call.query[row, head].float())
                    if spec.softcap is not None:
                        scores = spec.softcap * torch.tanh(scores / spec.softcap)
                    if spec.alibi_slopes is not None:
                        scores = scores + torch.tensor([spec.alibi_slopes[head] * (j - i) for j in seen], device=scores.device)
                    if call.bias is not None:
                        columns = [j if spec.bias_index == "key" else min(i - j, call.bias.shape[1] - 1) for j in seen]
                        scores = scores + call.bias[head, torch.tensor(columns, device=scores.device)].float()
                    sink = math.exp(float(sinks[head]) - float(scores.max())) if sinks is not None else 0.0
                    weights = torch.exp(scores - scores.max())
                    total = weights.sum() + sink
                    call.output[row, head] = ((weights / total) @ values[:, kv_head]).to(call.output.dtype)
                    if call.lse_out is not None:
                        call.lse_out[row, head] = torch.log(total) + scores.max()
                row += 1


def _sees(spec: AttentionSpec, i: int, j: int) -> bool:
    if spec.causal and j > i:
        return False
    if spec.sliding_window is not None and not i - spec.sliding_window < j:
        return False
    if spec.window_ahead is not None and not j < i + spec.window_ahead:
        return False
    if spec.chunk is None:
        return True
    chunks = i // spec.chunk - j // spec.chunk
    return {"intra": chunks == 0, "successive": chunks == 1, "inter": chunks > 1}[spec.chunk_part]
