"""The Ray example against stand-ins for ray.data and ray.serve: what it asks Ray for, and what its copies answer. Ray itself is 80 MB."""

from __future__ import annotations

import asyncio
import functools
import importlib
import sys
import types
from typing import Any

import pytest
import torch

from paged_attn import LLM
from tests.oracle import greedy

example = importlib.import_module("examples.data_parallel_ray")


class Table:
    """map_batches as ray.data has it: a class is made once for each of `concurrency` copies, and they take batches in turns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.asked = rows, dict[str, Any]()

    def map_batches(self, made: type, **asked: Any) -> Table:
        self.asked = asked
        copies = [made(*asked["fn_constructor_args"]) for _ in range(asked["concurrency"])]
        done = []
        for number, start in enumerate(range(0, len(self.rows), 2)):
            batch = self.rows[start : start + 2]
            out = copies[number % len(copies)]({key: [row[key] for row in batch] for key in batch[0]})
            done += [dict(zip(out, values, strict=True)) for values in zip(*out.values(), strict=True)]
        self.rows = done
        return self

    def take_all(self) -> list[dict[str, Any]]:
        return self.rows


def expected(prompt: str, count: int) -> str:
    """The unmodified model's own text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(example.EMBEDDED, dtype=torch.float32).eval()
    return bytes(greedy(model, list(prompt.encode()), count)).decode()


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """In float32, where no near-tie falls otherwise in a batch."""
    monkeypatch.setattr(example, "LLM", functools.partial(LLM, dtype=torch.float32))
    ray = types.ModuleType("ray")
    for name, value in names.items():
        setattr(ray, name, value)
        monkeypatch.setitem(sys.modules, f"ray.{name}", value)
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_table_is_completed_by_several_copies_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[Table] = []

    def from_items(rows: list[dict[str, Any]]) -> Table:
        tables.append(Table(rows))
        return tables[0]

    stand_in(monkeypatch, data=types.SimpleNamespace(from_items=from_items))
    rows = example.main(["--copies", "2"])
    assert [row["prompt"] for row in rows] == example.PROMPTS
    assert rows[0]["text"] == expected(example.PROMPTS[0], 24) and rows[2]["text"] == expected(example.PROMPTS[2], 24)
    asked = tables[0].asked
    assert (asked["concurrency"], asked["num_gpus"], asked["fn_constructor_args"]) == (2, 0, (example.EMBEDDED, "cpu"))


def test_the_service_has_as_many_copies_as_it_is_told_and_each_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Deployment:
        def __init__(self, made: type) -> None:
            self.made = made

        def bind(self, *arguments: Any) -> Any:
            return self.made, arguments

    def deployment(**options: Any) -> type[Deployment]:
        asked.append(options)
        return Deployment

    stand_in(monkeypatch, serve=types.SimpleNamespace(deployment=deployment))
    made, arguments = example.service({"copies": "3", "gpus": "1"})
    assert asked == [{"num_replicas": 3, "max_ongoing_requests": example.AT_ONCE, "ray_actor_options": {"num_gpus": 1.0}}]
    assert arguments == (example.EMBEDDED, "cuda")
    copy = made(example.EMBEDDED, "cpu")

    class Request:
        def __init__(self, prompt: str) -> None:
            self.prompt = prompt

        async def json(self) -> dict[str, Any]:
            return {"prompt": self.prompt, "max_new_tokens": 6}

    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*(copy(Request(prompt)) for prompt in example.PROMPTS))

    answers = asyncio.run(ask())
    assert [answer["text"] for answer in answers] == [expected(prompt, 6) for prompt in example.PROMPTS]
    assert all(answer["finish_reason"] == "length" for answer in answers)
