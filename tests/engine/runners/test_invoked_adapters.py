"""An adapter that begins behind certain tokens of a text is refused: without peft's own call it would change all of them, or none."""

from __future__ import annotations

import pytest

from paged_attn import LLM, UnsupportedError
from tests.tiny_models import build_short


@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_named(compiled: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[2, 33], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match="the adapter default has alora_invocation_tokens"):
        LLM(peft.get_peft_model(build_short("llama"), config), compile=compiled, num_pages=40)
