"""`LLM`: prompts in, completions out, over one engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged_attn.backends.devices import checked_device
from paged_attn.chat.answers.answer_form import AnswerForm
from paged_attn.chat.several import CHAT_SETTINGS, ChatCompletion, ChatEvent, Chats, chat_events
from paged_attn.engine.config import LORAS, EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.model.given_model import given_model, warn_of_hook
from paged_attn.engine.model.load_options import LoadOptions
from paged_attn.engine.model.task import Task, checked_task
from paged_attn.engine.pooling.calls import PoolingCalls
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.pooling.sentence_transformers import EmbeddingDefaults
from paged_attn.engine.prompts import Loras, Params, Prompt, as_list, loras_of_each, one_of
from paged_attn.engine.requests.outputs import Completion, FinishReason, TokenEvent
from paged_attn.engine.requests.pooled_rows import PoolingParams
from paged_attn.engine.requests.request import Request
from paged_attn.engine.runners.compilers import start_compilers
from paged_attn.engine.sampling_params import INTO_PARAMS, SamplingParams
from paged_attn.engine.setting_names import OTHER_CALL, tells_names
from paged_attn.interrupts import held_back, uninterrupted
from paged_attn.progress import bar, draws
from paged_attn.progress import progress as showing
from paged_attn.shown import is_utf8, shown
from paged_attn.truncation import Cut, ids_of_text


class LLM(PoolingCalls):
    """Serve a Hugging Face causal LM with paged KV, prefix sharing and continuous batching.

    Args:
        model: a loaded model (any dtype; it is not changed), a directory, a GGUF file, or a hub id. A multimodal model is served for text
            only. For a compiled model, the model inside is served.
        tokenizer: for a loaded model, if prompts or stop strings are text; a path loads its own. May itself be a path.
        task: "generate", "embed" or "classify"; "auto" follows the checkpoint: sequence-classification heads classify, encoders (BERT)
            and sentence-transformers folders embed, all others generate.
        dtype, device: for a path; objects or names. Default: the checkpoint's dtype, on the GPU if there is one.
        revision, trust_remote_code, gguf_file, quantization_config: for a path; see `LoadOptions`.
        config: engine settings; single settings may be given as keywords: `LLM(model, page_size=32)`.
        embedding_defaults: embedding options for calls that do not set them; for a path, those of its folder.
        loras: peft adapters that requests may choose by name: the folder that `save_pretrained` wrote, or a PeftModel. Without
            max_loras there is room for eight, or for as many as are given. See also `load_lora` and `unload_lora`.
        progress: show bars on stderr while it loads, compiles and captures; None shows them on a terminal only.

    Raises:
        ValueError: the path holds no model, or a setting is unknown or out of range.
        UnsupportedError: the model has an attention that cannot be proved, or that no backend can run.

    Calls may come from several threads; they share the engine's batches. If a step raises, the call that ran it raises the error.
    """

    engine: Engine

    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        tokenizer: Any = None,
        task: Task = "auto",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
        quantization_config: Any = None,
        config: EngineConfig | None = None,
        loras: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        embedding_defaults: EmbeddingDefaults | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise TypeError(f"config is a {type(config).__name__}; allowed is an EngineConfig, or single settings as keywords")
        if not isinstance(model, (nn.Module, str, Path)):
            raise TypeError(f"model is a {type(model).__name__}; allowed are a loaded model, a directory or a hub id")
        config = EngineConfig.from_environment(**settings) if config is None else config.with_(**settings)
        if loras:
            config = config.with_adapters(max(LORAS, len(loras)))
        task, read = checked_task(task), LoadOptions(None, revision, trust_remote_code, gguf_file, quantization_config)
        with showing(progress):
            if isinstance(model, (str, Path)):
                start_compilers(checked_device(device), config)
            given = given_model(model, tokenizer, task, dtype, device, read)
            if config.compile:
                warn_of_hook(given.model)
            self.tokenizer = given.tokenizer
            served = given.model if given.task == "generate" else Pooler.of(given.model, given.task, embedding_defaults or given.defaults)
            self.engine = Engine(served, given.tokenizer, config)
        self._lock = threading.RLock()
        self._inboxes: dict[str, deque[TokenEvent]] = {}
        for name, source in (loras or {}).items():
            self.load_lora(name, source)

    @tells_names("LLM.generate", INTO_PARAMS | OTHER_CALL)
    @uninterrupted
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete all prompts in one continuous batch; results are in the order of the prompts, all answers to a prompt together.

        Args:
            prompts: texts or lists of token ids, in any mix; a single one counts as a list of one. A text may also be given as
                {"prompt": text}, token ids as {"prompt_token_ids": ids}, and a tokenizer's output unchanged, including padding.
            params: for all prompts, or one for each; also as `sampling_params`. May be a transformers `GenerationConfig`. With `n`
                above 1 each prompt has n completions, which share its KV; `index` and `answer` identify them.
            lora: the name of a loaded adapter, for all prompts, or one for each; None: the model without an adapter.
            namespace, priority: see `Engine.add_request`.
            progress: show a bar on stderr that counts finished prompts; None shows it on a terminal, for calls longer than a second.

        Raises:
            ValueError, UnsupportedError: a prompt that `Engine.add_request` refuses (then none of them runs), or logits that are not
                finite (then the other prompts of this call are cancelled).
        """
        requests = self._add(prompts, one_of(params, sampling_params), namespace, priority, streamed=False, lora=lora)
        self._finish(requests, progress)
        return [request.completion() for request in requests]

    @tells_names("LLM.chat", INTO_PARAMS | OTHER_CALL)
    @uninterrupted
    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        reasoning_effort: str | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[ChatCompletion]:
        """Generate the next message of each conversation, using the tokenizer's chat template, in one continuous batch.

        Args:
            messages: one conversation, or a list of conversations: [{"role": "user", "content": "Hello"}, ...]. Answers of earlier calls
                (`completion.message`) may be among them.
            params, sampling_params, lora, namespace, priority, progress: as for `generate`.
            tools, tool_choice and the rest: see `ChatRequest`.

        Raises:
            ChatError: messages, tools or settings that cannot be served, or no chat template; the message says what to do.
            ValueError, UnsupportedError: as `generate` does.
        """
        settings = {
            "tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, "tool_parser": tool_parser, "reasoning_parser": reasoning_parser,
            "reasoning_effort": reasoning_effort,
        }  # fmt: skip
        chats = self._chats(messages, settings, one_of(params, sampling_params))
        requests = self._add(chats.texts, chats.params, namespace, priority, streamed=False, forms=chats.forms, lora=lora)
        self._finish(requests, progress)
        return [ChatCompletion.read(request.completion(), chats.forms[request.index]) for request in requests]

    @tells_names("LLM.stream_chat", INTO_PARAMS | OTHER_CALL, CHAT_SETTINGS)
    @uninterrupted
    def stream_chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
        **settings: Any,
    ) -> Generator[ChatEvent]:
        """Like `chat`, with the same arguments, but streaming: yields a ChatEvent for each piece of content or reasoning, and for
        each complete tool call. Closing the iterator cancels the rest.

        Messages are checked and queued at the call, not at the first `next`.
        """
        chats = self._chats(messages, settings, one_of(params, sampling_params))
        events = self._events(self._add(chats.texts, chats.params, namespace, priority, streamed=True, forms=chats.forms, lora=lora))
        next(events)
        return chat_events(events, chats.forms)  # type: ignore[arg-type]

    def _chats(self, messages: Sequence[Any], settings: Mapping[str, Any], params: Any) -> Chats:
        return Chats.of(self.tokenizer, messages, settings, lambda count: self.engine.input_processor.params_of_each(params, count))

    def _finish(self, requests: list[Request], progress: bool | None) -> None:
        """Step until requests that were queued have ended; raises as `generate` does."""
        try:
            with showing(progress), _bar(len(requests), progress) if draws() else nullcontext() as shown:
                while any(r.finish_reason is None for r in requests):
                    self._step()
                    held_back.check()
                    self._raise_errors(requests)
                    if shown is not None:
                        _show(shown, requests)
            self._raise_errors(requests)  # another thread may have run the last step
        finally:
            self._drop(requests)

    @tells_names("LLM.stream", INTO_PARAMS | OTHER_CALL)
    @uninterrupted
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        lora: Loras = None,
        namespace: Any = None,
        priority: int = 0,
    ) -> Generator[TokenEvent]:
        """Yield a TokenEvent for every new token; its `index` is the prompt's, its `answer` says which of `n` answers. Closing the
        iterator cancels the rest.

        Prompts are checked and queued at the call, not at the first `next`.
        """
        events = self._events(self._add(prompts, one_of(params, sampling_params), namespace, priority, streamed=True, lora=lora))
        next(events)  # from here on, closing it cancels the requests even if nothing was read
        return events  # type: ignore[return-value]

    @property
    def default_params(self) -> SamplingParams:
        """Values for params that a request does not set: those of the model's generation_config, or our own defaults."""
        return self.engine.default_params

    def get_tokenizer(self) -> Any:
        """`tokenizer`, as vLLM's method of this name. Raises ValueError: there is none."""
        if self.tokenizer is None:
            raise ValueError("this LLM has no tokenizer; give LLM(model, tokenizer=...) one, or the path of one")
        return self.tokenizer

    def load_lora(self, name: str, source: Any) -> None:
        """Load an adapter that requests can choose by this name: `generate(..., lora=name)`. Works while requests run.

        Args:
            source: the folder that `save_pretrained` of a PeftModel wrote, or a PeftModel.

        Raises:
            ValueError: the name is in use, there is no room for it or for its rank, or no adapter in the folder.
            UnsupportedError: one of its settings, or a layer that it changes, is not supported; the message names it.
        """
        with self._lock:
            self.engine.load_lora(name, source)

    def unload_lora(self, name: str) -> None:
        """Unload an adapter. Raises ValueError: it is not loaded, or unfinished requests use it."""
        with self._lock:
            self.engine.unload_lora(name)

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return () if self.engine.adapters is None else tuple(self.engine.adapters.loaded)

    def cancel(self, request_id: str) -> bool:
        """End one prompt of a stream, by the `request_id` of its events, now or after the step that this is called from within; False if it
        has ended."""
        with self._lock:
            return self.engine.cancel(request_id)

    def look_at_model(self) -> None:
        """Raises ModelChangedError if the model is no longer what the engine runs; the next request would raise it, too."""
        with self._lock:
            self.engine.look_at_model()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.engine.watch is None

    def clear_prefix_cache(self) -> int:
        """Forget all cached prefixes that no running request uses; returns how many pages that freed."""
        with self._lock:
            return self.engine.clear_prefix_cache()

    def run_one_token(self) -> None:
        """Run a request of one token, as commands do before they measure or serve, so that one-time work is done."""
        pooler = self.engine.pooler
        if pooler is None:
            self.generate([[0]], SamplingParams(max_new_tokens=1))
        elif pooler.head is None:
            self.embed([[pooler.some_id]])
        else:
            self.classify([[pooler.some_id]])

    def close(self) -> None:
        """Cancel running requests and free the memory of KV pages, states and graphs; the model lives as long as it is referenced. After
        this, other calls raise."""
        with self._lock:
            self.engine.release()

    def __reduce__(self) -> Any:
        raise TypeError("an LLM can be neither copied nor pickled; make one in each process, of the model's path, or share this one")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, requests: list[Request]) -> Generator[TokenEvent | None]:
        try:
            yield None
            while True:
                with self._lock:  # before the inboxes are read: another thread's step may fill them after
                    finished = all(r.finish_reason is not None for r in requests)
                for request in requests:
                    inbox = self._inboxes[request.id]
                    while inbox:
                        event = inbox.popleft()
                        event.index, event.answer = request.index, request.answer
                        yield event
                self._raise_errors(requests)
                if finished:
                    for request in requests:
                        if request.finish_reason is FinishReason.CANCELLED:  # by another caller: `close`
                            yield TokenEvent(request.id, None, "", str(request.finish_reason), index=request.index, answer=request.answer)
                    return
                self._step()
        finally:
            try:
                self._drop(requests)
            except KeyboardInterrupt:  # it came before `_drop` held it back
                self._drop(requests)
                raise

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        namespace: Any,
        priority: int,
        streamed: bool,
        forms: Sequence[AnswerForm] | None = None,
        lora: Loras = None,
    ) -> list[Request]:
        """Queue prompts; with `forms` they are texts of chats, which hold all special tokens that they need."""
        listed = as_list(prompts)
        processor = self.engine.input_processor
        taken = processor.params_of_each(params, len(listed), streamed)
        cuts = map(processor.cut, taken)
        ids = [self._token_ids(prompt, cut, is_chat=forms is not None) for prompt, cut in zip(listed, cuts, strict=True)]
        loras = loras_of_each(lora, len(listed))
        kept = [frozenset[int]()] * len(listed) if forms is None else [form.kept for form in forms]
        own = [
            {"prompt": prompt if isinstance(prompt, str) else None, "kept_tokens": tokens, "lora": name}
            for prompt, tokens, name in zip(listed, kept, loras, strict=True)
        ]
        asked = list(zip(ids, [each.answers() for each in taken], own, strict=True))
        return self._queue(asked, streamed, namespace=namespace, priority=priority)

    def _queue(
        self,
        asked: Sequence[tuple[Sequence[int], Sequence[SamplingParams | PoolingParams], Mapping[str, Any]]],
        streamed: bool = False,
        **of_all: Any,
    ) -> list[Request]:
        """Add requests to the engine, all or none: of each prompt its tokens, the params of each answer to it, and what else
        `Engine.add_request` takes, as `of_all` is for all of them."""
        requests: list[Request] = []
        with self._lock, ExitStack() as undo:
            undo.callback(self._drop, requests)
            try:
                for index, (tokens, answers, own) in enumerate(asked):
                    for number, params in enumerate(answers):
                        added = self.engine.add_request(tokens, params, text_at_end=not streamed, **own, **of_all)
                        added.index, added.answer = index, number
                        requests.append(added)
            except (ValueError, TypeError) as error:
                error.add_note(f"(prompt {index + 1} of {len(asked)})")
                raise
            if streamed:
                self._inboxes.update({request.id: deque() for request in requests})
            undo.pop_all()
        return requests

    def _token_ids(self, prompt: Prompt, cut: Cut | None = None, is_chat: bool = False) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("a prompt is text, but there is no tokenizer; give LLM(model, tokenizer=...) or lists of token ids")
        if not is_utf8(prompt):
            raise ValueError(f"a prompt is {shown(prompt)}, which no UTF-8 can carry: it has half of a surrogate pair")
        return ids_of_text(self.tokenizer, prompt, cut, **({"add_special_tokens": False} if is_chat else {}))

    @uninterrupted
    def _step(self) -> None:
        with self._lock:
            try:
                events = self.engine.step()
            except BaseException:
                self._hand_out(self.engine.take_due_events())  # events of requests that ended before the error
                raise
            self._hand_out(events)

    def _hand_out(self, events: Sequence[TokenEvent]) -> None:
        for event in events if self._inboxes else ():
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.append(event)

    @uninterrupted
    def _drop(self, requests: list[Request]) -> None:
        with self._lock:
            for request in requests:
                self.engine.cancel(request.id)
                self._inboxes.pop(request.id, None)

    @staticmethod
    def _raise_errors(requests: list[Request]) -> None:
        for request in requests:
            if request.error is not None:
                raise request.error


def _bar(prompts: int, progress: bool | None) -> Any:
    return bar(total=prompts, what="prompts", unit="prompt", delay=0.0 if progress else 1.0)


def _show(shown: Any, requests: Sequence[Request]) -> None:
    """Finished prompts and new tokens, on a tqdm bar."""
    shown.set_postfix_str(f"{sum(r.num_sampled for r in requests):,} tokens", refresh=False)
    shown.update(sum(r.finish_reason is not None for r in requests) - shown.n)
