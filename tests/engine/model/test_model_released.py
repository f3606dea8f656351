"""An engine that is gone keeps neither its model nor its graphs in memory, though Dynamo keeps every backend that it was given."""

from __future__ import annotations

import gc
import weakref

import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.compiled_graph import CompiledGraph
from tests.tiny_models import build


@pytest.mark.parametrize("compile", [True, False])
def test_model_and_graphs_go_with_their_engine(compile: bool) -> None:
    def graphs() -> int:
        gc.collect()
        return sum(isinstance(each, CompiledGraph) for each in gc.get_objects())

    before = graphs()
    model = build("llama")
    llm = LLM(model, num_pages=16, page_size=4, compile=compile)
    llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    gone = weakref.ref(model)
    llm.close()
    del llm, model
    assert graphs() == before
    assert gone() is None
