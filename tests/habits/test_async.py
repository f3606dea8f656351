"""asyncio as people use it who come from vLLM's AsyncLLM or OpenAI's client: loops left early, many tasks, timeouts, chats; on the model in
the package, against `LLM`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import LLM, AsyncLLM, SamplingParams
from paged_attn.chat.errors import ChatError
from paged_attn.chat.parts import Content, ToolCall

DEMO = Path(paged_attn.__file__).parent / "demo_model"
HELLO = [{"role": "user", "content": "It was a fine day."}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Bath", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
SHORT, CALL = SamplingParams(max_tokens=12), SamplingParams(max_tokens=80)
PROMPTS = ["It was a", "Her sister", "In the morning"]


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    """What `LLM` says."""
    with LLM(DEMO, dtype=torch.float32, num_pages=512, compile=False) as llm:
        (chat,) = llm.chat(HELLO, SHORT)
        return {
            "texts": [each.text for each in llm.generate(PROMPTS, SHORT)], "chat": chat.message,
            "chats": [each.message for each in llm.chat([HELLO, HELLO[:1]], SHORT)],
            "parts": [(event.part, event.finish_reason) for event in llm.stream_chat(HELLO, SHORT)],
        }  # fmt: skip


def test_one_program_with_everything(wanted: dict[str, Any]) -> None:
    async def main() -> None:
        async with AsyncLLM(DEMO, dtype=torch.float32, num_pages=512, compile=False) as llm:
            engine = llm.thread.engine
            assert engine is not None
            # One after the other, all together, and in one call.
            assert [(await llm.generate(prompt, SHORT))[0].text for prompt in PROMPTS] == wanted["texts"]
            together = await asyncio.gather(*(llm.generate(prompt, sampling_params=SHORT) for prompt in PROMPTS))
            assert [done[0].text for done in together] == wanted["texts"]
            assert [done.text for done in await llm.generate(PROMPTS, SHORT)] == wanted["texts"]

            # Streams.
            assert "".join([event.text async for event in llm.stream(PROMPTS[0], SHORT)]) == wanted["texts"][0]
            async for event in llm.stream(PROMPTS[0], SamplingParams(max_tokens=400)):
                assert event.token_id is not None
                break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))

            # Chats.
            assert (await llm.chat(HELLO, SHORT))[0].message == wanted["chat"]
            assert [each.message for each in await llm.chat([HELLO, HELLO[:1]], SHORT)] == wanted["chats"]
            parts = [event async for event in llm.stream_chat(HELLO, SHORT)]
            text = "".join(event.part.text for event in parts if isinstance(event.part, Content))
            assert text == "".join(part.text for part, _ in wanted["parts"] if part is not None) and parts[-1].finish_reason == "length"
            calling: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            (called,) = await llm.chat(HELLO, CALL, **calling)
            assert called.message.tool_calls[0].name == "weather" and called.finish_reason == "tool_calls"
            calls = [event.part async for event in llm.stream_chat(HELLO, CALL, **calling)]
            assert any(isinstance(part, ToolCall) and part.name == "weather" for part in calls)
            with pytest.raises(ChatError, match="role"):
                await llm.chat([{"content": "no role"}])
            with pytest.raises(TypeError, match="tool_chice"):
                await llm.chat(HELLO, tool_chice="auto")

            # Nobody is left.
            async with asyncio.timeout(20):
                while llm.thread._owners or llm.thread._cancels or engine.has_work:
                    await asyncio.sleep(0.01)
            assert engine.kv.num_available == engine.kv.num_usable
            assert llm.get_tokenizer() is not None and llm.default_params == engine.default_params

    asyncio.run(main())


@pytest.mark.slow
def test_a_class_that_needs_nothing_of_the_server() -> None:
    code = "import sys, paged_attn; paged_attn.AsyncLLM; print([m for m in ('fastapi', 'uvicorn', 'starlette') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
