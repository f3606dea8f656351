"""Text to token ids and back: prompts, chat templates, the text of one token."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paged_attn.server.errors import ApiError
from paged_attn.server.job import Prompt

T = TypeVar("T")
REPLACEMENT = "\ufffd"


class Texts:
    """A tokenizer for the server's own use.

    Prompts are tokenized in one thread, so that a long one holds up neither the event loop nor the engine, and with a copy, for tokenizers
    written in Rust refuse to be changed by one thread while another reads them.

    Args:
        tokenizer: of the model, or None: then prompts must be token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._copy = copy.deepcopy(tokenizer)
        self._worker = ThreadPoolExecutor(1, "paged-attn-tokenizer")
        self._token_texts: dict[int, str] = {}

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, given: object) -> list[Prompt]:
        """The prompts of a completion request: a text, token ids, or a list of either.

        Raises:
            ApiError: 400 if it is anything else, or text that can not be tokenized.
        """
        return await self.in_worker(lambda: [self._prompt(each) for each in _listed(given)])

    async def chat(self, messages: list[dict[str, Any]], template_settings: dict[str, Any]) -> Prompt:
        """Messages in the tokenizer's chat template, with the beginning of the answer.

        Raises:
            ApiError: 400 if there is no template, or it refuses the messages; then with its own words.
        """
        return await self.in_worker(lambda: self._chat(messages, template_settings))

    def of_token(self, token_id: int) -> str:
        """A token's text with its leading space; `token_id:N` for one that is no whole text, such as a part of a character."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._of_token(token_id)
        return self._token_texts[token_id]

    async def in_worker(self, work: Callable[[], T]) -> T:
        """What `work` returns, from the thread for long work."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _prompt(self, given: str | list[int]) -> Prompt:
        if not isinstance(given, str):
            return Prompt(given)
        if self._copy is None:
            raise ApiError(400, "the prompt is text, but this model has no tokenizer; send token ids", param="prompt")
        return Prompt(self._copy(_checked(given, "prompt")).input_ids, given)

    def _chat(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> Prompt:
        from jinja2 import TemplateError

        if getattr(self._copy, "chat_template", None) is None:
            what = "tokenizer" if self._copy is None else "chat template"
            raise ApiError(400, f"this model has no {what}, so that it can not chat; use /v1/completions", code="no_chat_template")
        own = set(inspect.signature(self._copy.apply_chat_template).parameters) & set(settings)
        if own:
            raise ApiError(400, f"chat_template_kwargs may not hold {', '.join(sorted(own))}", param="chat_template_kwargs")
        try:
            text = self._copy.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error
        return Prompt(self._copy(_checked(text, "messages"), add_special_tokens=False).input_ids, text)

    def _of_token(self, token_id: int) -> str:
        """From two of them in a row: decoders drop the space before the first word."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        once, twice = (self.tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        text: str = twice[len(once) :] if twice.startswith(once) else once
        return text if text and REPLACEMENT not in text else f"token_id:{token_id}"


def _listed(given: object) -> Sequence[str | list[int]]:
    """Only the form is looked at here; the engine looks at each id."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(_is_id(each) for each in given):
            return [given]
        if all(isinstance(each, str) or (isinstance(each, list) and all(map(_is_id, each))) for each in given):
            return given
    what = f"a {type(given).__name__}" if given is not None else "null"
    if isinstance(given, list):
        what = "a list of other things" if given else "an empty list"
    allowed = "a text, a list of texts, a list of token ids, or a list of such lists"
    raise ApiError(400, f"prompt is {what}; allowed are {allowed}", param="prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"half of a surrogate pair ({text[error.start]!a} at character {error.start})"
        raise ApiError(400, f"{param} holds {what}, which is no text; send both halves or none", param=param) from error
    return text
