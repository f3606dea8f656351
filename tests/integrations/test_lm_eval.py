"""lm-evaluation-harness with the model in its process: the numbers and texts of its own `hf` model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import LLM

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[lm-eval]'")
DEMO = Path(paged_attn.__file__).parent / "demo_model"
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[None, 40])
def models(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The harness' own model and ours, with the model's positions and with windows of 40 tokens."""
    from lm_eval.models.huggingface import HFLM

    from paged_attn.integrations.lm_eval import PagedAttnLM

    ours = PagedAttnLM(DEMO, dtype="float32", max_length=request.param, num_pages=512)
    yield HFLM(str(DEMO), dtype="float32", device="cpu", max_length=request.param), ours
    ours.llm.close()


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def test_loglikelihood(models: tuple[Any, Any]) -> None:
    long = TEXT * 2
    asked = instances(
        "loglikelihood", ("It was a", " strong"), ("It was a", " dark"), ("", "She had"), ("She ", "had é"), (long, " It"),
        (long, TEXT[:39]), ("It was a", " strong sight"), ("x", "y" * 40),
    )  # fmt: skip
    theirs, ours = (model.loglikelihood(asked, disable_tqdm=True) for model in models)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=TOLERANCE)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs] and {True, False} == {greedy for _, greedy in ours}


def test_rolling(models: tuple[Any, Any]) -> None:
    asked = instances("loglikelihood_rolling", ("It was a",), (TEXT,), ("x",), ("é" * 30,))
    theirs, ours = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in models)
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


def test_generate_until(models: tuple[Any, Any]) -> None:
    settings: list[dict[str, Any]] = [{"until": ["h", "."], "max_gen_toks": 20}, {"until": [], "max_gen_toks": 20, "do_sample": False}]
    asked = instances("generate_until", *[(text, each) for text in ("It was a", "She had never", TEXT) for each in settings])
    theirs, ours = (model.generate_until(asked, disable_tqdm=True) for model in models)
    assert ours == theirs and all(ours)


def test_tasks_of_local_files_by_the_models_name(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import paged_attn.integrations.lm_eval  # noqa: F401  (it registers the name)

    docs = [{"query": "It was a", "choices": ["strong", "dark"], "gold": 0}, {"query": "She had", "choices": ["been", "x"], "gold": 1}]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    lines = [
        "task: local_choice", "dataset_path: json", f"dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}}}", "test_split: test",
        "output_type: multiple_choice", 'doc_to_text: "{{query}}"', 'doc_to_target: "{{gold}}"', 'doc_to_choice: "{{choices}}"',
        "metric_list: [{metric: acc}]",
    ]  # fmt: skip
    (tmp_path / "local.yaml").write_text("\n".join(lines))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    scores = {}
    for name, more in (("hf", ""), ("paged_attn", ",num_pages=64")):
        result = simple_evaluate(
            model=name, model_args=f"pretrained={DEMO},dtype=float32{more}", tasks=["local_choice"], task_manager=tasks, device="cpu",
            batch_size=2, log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
        scores[name] = [value for sample in result["samples"]["local_choice"] for value, _ in sample["filtered_resps"]]
    assert scores["paged_attn"] == pytest.approx(scores["hf"], abs=TOLERANCE) and len(scores["hf"]) == 4


def test_an_llm_that_is_there_already_and_what_is_refused() -> None:
    from paged_attn.integrations.lm_eval import PagedAttnLM

    with LLM(DEMO, dtype=torch.float32, num_pages=64) as llm:
        own = PagedAttnLM(llm=llm)
        assert own.max_length == llm.engine.input_processor.room and own.tokenizer is llm.tokenizer
        own.tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        )
        assert own.apply_chat_template([{"role": "user", "content": "Hi"}]) == "user: Hi>"
        assert own.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == "user: Hi"
        with pytest.raises(ValueError, match="page_size: settings are for an engine that is made here; llm= has its own"):
            PagedAttnLM(llm=llm, page_size=4)
        with pytest.raises(ValueError, match="give either pretrained=PATH_OR_HUB_ID or llm="):
            PagedAttnLM(DEMO, llm=llm)
        with pytest.raises(ValueError, match="max_gen_toks is 5000; allowed are less than max_length"):
            own.generate_until(instances("generate_until", ("It was", {"max_gen_toks": 5000})))
        with pytest.raises(ValueError, match="a continuation has 3000 tokens; allowed are"):
            own._loglikelihood_tokens([(None, [5], [6] * 3000)])
    with pytest.raises(ValueError, match="dtype is 'float23'; allowed are auto, float32"):
        PagedAttnLM(DEMO, dtype="float23")


def test_scores_are_held_for_some_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.integrations import lm_eval as own

    monkeypatch.setattr(own, "SCORES_AT_A_TIME", 10)
    requests = [(None, [1], [2] * count) for count in (4, 6, 1, 30, 2, 3)]
    assert [[len(request[2]) for request in group] for group in own._groups(requests)] == [[4, 6], [1], [30], [2, 3]]
