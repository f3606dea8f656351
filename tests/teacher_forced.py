"""Logits of given tokens: through an engine's own steps, graphs and all; and by the model, a prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import BatchRequest, RequestColumns
from paged_attn.engine.engine import Engine

CHUNK = 48  # tokens of a prompt in one step


def by_engine(engine: Engine, sequences: Sequence[Sequence[int]], decoded: int) -> list[Tensor]:
    """Logits [decoded + 1, vocabulary] of the last tokens of each sequence: all but the last `decoded` are computed in chunks, of all
    sequences together, and the others in decode steps."""
    size = engine.config.page_size
    counts = [-(-len(tokens) // size) for tokens in sequences]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    tables = [list(range(1 + end - count, 1 + end)) for count, end in zip(counts, ends, strict=True)]
    assert ends[-1] * max(len(engine.pool.groups), 1) < engine.pool.num_pages, f"the pool needs {ends[-1] + 1} pages"
    done, found = [0] * len(sequences), [list[Tensor]() for _ in sequences]
    while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
        requests, wanted = [], []
        for i, tokens in enumerate(sequences):
            prompt = len(tokens) - decoded
            end = min(prompt, done[i] + CHUNK) if done[i] < prompt else done[i] + 1
            if done[i] == len(tokens) or (done[i] >= prompt and any(d < len(t) - decoded for d, t in zip(done, sequences, strict=True))):
                continue  # decode steps come when all prompts are computed
            requests.append(BatchRequest(tokens[done[i] : end], tables[i], done[i], int(end >= prompt), i + 1))
            wanted += [i] * (end >= prompt)
            done[i] = end
        with torch.no_grad():
            logits = engine.step_runner.run(engine.step_runner.prepare(_columns(requests, engine))).logits
        for i, row in zip(wanted, logits.float().clone(), strict=True):
            found[i].append(row)
    return [torch.stack(rows) for rows in found]


def _columns(requests: Sequence[BatchRequest], engine: Engine) -> RequestColumns:
    """With layers in groups, a page of a request is a page of the pool in each, and page 0 where no token to come sees it."""
    columns, groups, size = RequestColumns.of(requests), engine.pool.groups, engine.config.page_size
    if groups:
        table, column = columns.page_table, np.arange(columns.page_table.shape[1])
        tables = np.stack([np.where(table > 0, (table - 1) * len(groups) + index + 1, 0) for index in range(len(groups))])
        for group, of_group in zip(groups, tables, strict=True):
            of_group[column < group.keeps.first(columns.num_cached)[:, None] // size] = 0
        columns.page_table, columns.group_tables = tables[0], tables[1:]
    return columns


def by_model(model: Any, sequences: Sequence[Sequence[int]], decoded: int) -> list[Tensor]:
    """The same of the model itself, every sequence in one call without a cache."""
    device = next(model.parameters()).device
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([list(tokens)], device=device), use_cache=False).logits[0, -decoded - 1 :].float()
            for tokens in sequences
        ]
