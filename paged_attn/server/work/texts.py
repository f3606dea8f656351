"""Text to token ids and back: prompts, chat templates, the text of one token."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from paged_attn.chat.errors import ChatError
from paged_attn.chat.request import ChatRequest
from paged_attn.engine.pooling.texts import pair_tokens
from paged_attn.server.http.errors import ApiError
from paged_attn.server.work.fair_pool import FairPool
from paged_attn.server.work.job import Prompt
from paged_attn.shown import shown

T = TypeVar("T")
REPLACEMENT = "\ufffd"
THREADS, LONG_THREADS = 2, 1
SHORT = 64 << 10  # characters of all prompts of a request: some 20 ms
LIKELY_CHARACTERS = 8  # of a token; text is seldom made of longer ones
SLACK = 16  # tokens that a cut in the middle of a word may add


class Texts:
    """A tokenizer for the server's own use.

    Prompts are tokenized in threads, so that a long one holds up neither the event loop nor the engine nor the short ones of other
    clients, and with copies, for tokenizers written in Rust refuse to be changed by one thread while another reads them.

    Args:
        tokenizer: of the model, or None: then prompts must be token ids.
        room: the tokens of the longest prompt that can be served.
    """

    def __init__(self, tokenizer: Any, room: int) -> None:
        self.tokenizer, self.room = tokenizer, room
        self._copies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(THREADS):
            self._copies.put(copy.deepcopy(tokenizer))
        longest = 0 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=0)
        self.max_characters = room * longest
        self._pool = FairPool("paged-attn-tokenizer", THREADS, LONG_THREADS)
        self._token_texts: dict[int, str] = {}
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def close(self) -> None:
        self._pool.close()

    async def prompts(self, given: object, client: Hashable, param: str = "prompt") -> list[Prompt]:
        """The prompts of a completion request, as `listed` gives them; `param` is the field that they came in.

        Raises:
            ApiError: 400 if it is anything else, or text that can not be tokenized, or longer than what can be served.
        """
        listed_prompts = listed(given, param)
        length = sum(map(len, listed_prompts))
        return await self._in_thread(client, length, lambda own: [self._prompt(own, each, param) for each in listed_prompts])

    async def pairs(self, pairs: Sequence[tuple[str, str]], client: Hashable) -> list[Prompt]:
        """Two texts each, as the model's tokenizer joins them.

        Raises:
            ApiError: 400 for texts that can not be tokenized or are too long, or without a tokenizer.
        """
        length = sum(len(text) for pair in pairs for text in pair)
        return await self._in_thread(client, length, lambda own: [self._pair(own, *pair) for pair in pairs])

    async def chat(self, request: ChatRequest, guide: tuple[str, str] | None, client: Hashable) -> Prompt:
        """Messages in the tokenizer's chat template, with the beginning of the answer, and how answers are read.

        Args:
            guide: what the answer follows besides, as `SamplingParams.guide` has it.

        Raises:
            ApiError: 400 if there is no template, or it refuses the messages; then with its own words. Or the prompt is too long.
        """
        return await self._in_thread(client, _length(request.messages), lambda own: self._chat(own, request, guide))

    def of_token(self, token_id: int) -> str:
        """A token's text with its leading space; `token_id:N` for one that is no whole text, such as a part of a character."""
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._of_token(token_id)
        return self._token_texts[token_id]

    def of_tokens(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens included; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Whether a tokenizer may have added it to a text."""
        return token_id in self._special

    async def _in_thread(self, client: Hashable, length: int, work: Callable[[Any], T]) -> T:
        def with_own_tokenizer() -> T:
            own = self._copies.get()
            try:
                return work(own)
            finally:
                self._copies.put(own)

        return await self._pool.run(client, with_own_tokenizer, is_long=length > SHORT)

    def _pair(self, own: Any, first: str, second: str) -> Prompt:
        for text in (first, second):
            self._check_length(text, "text")
        try:
            tokens = pair_tokens(own, first, second)
        except ValueError as error:
            raise ApiError(400, str(error), param="text") from error
        return Prompt(tokens.ids, None, token_types=tokens.token_types)

    def _prompt(self, own: Any, given: str | list[int], param: str = "prompt") -> Prompt:
        if not isinstance(given, str):
            if len(given) > 2 * self.room:  # of one that is a little longer the engine says by how much
                raise self._too_long(len(given), param)
            return Prompt(given)
        if own is None:
            raise ApiError(400, "the prompt is text, but this model has no tokenizer; send token ids", param=param)
        return Prompt(self._ids(own, given, param), given)

    def _chat(self, own: Any, request: ChatRequest, guide: tuple[str, str] | None) -> Prompt:
        try:
            prompt = request.prompt(own, guide)
        except ChatError as error:
            raise ApiError(400, str(error), param=error.param, code=error.code) from error
        form = prompt.form.with_tokenizer(self.tokenizer)
        return Prompt(self._ids(own, prompt.text, "messages", add_special_tokens=False), prompt.text, form)

    def _ids(self, own: Any, text: str, param: str, **settings: Any) -> list[int]:
        """Of text that is far too long only the beginning is tokenized."""
        self._check_length(text, param)
        head = LIKELY_CHARACTERS * self.room
        if len(text) > head and (count := len(own(text[:head], **settings).input_ids) - SLACK) > self.room:
            raise self._too_long(count, param)
        ids: list[int] = own(text, **settings).input_ids
        return ids

    def _check_length(self, text: str, param: str) -> None:
        if len(text) > self.max_characters:
            most = f"{self.room:,} tokens, for which there is room, are {self.max_characters:,} at most"
            raise ApiError(400, f"{param} has {len(text):,} characters; {most}; shorten it", param=param)
        _check_text(text, param)

    def _too_long(self, count: int, param: str) -> ApiError:
        return ApiError(400, f"{param} has {count:,} tokens or more; there is room for {self.room:,}; shorten it", param=param)

    def _of_token(self, token_id: int) -> str:
        """From two of them in a row: decoders drop the space before the first word."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        once, twice = (self.tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        text: str = twice[len(once) :] if twice.startswith(once) else once
        return text if text and REPLACEMENT not in text else f"token_id:{token_id}"


def _length(messages: Sequence[Any]) -> int:
    """About how many characters there are, of messages that nobody has looked at."""
    contents = [content for message in messages if isinstance(message, dict) and (content := message.get("content"))]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))


def listed(given: object, param: str = "prompt") -> Sequence[str | list[int]]:
    """A text, token ids, or a list of either, as a list. Only the form is looked at; the engine looks at each id.

    Raises:
        ApiError: 400 for anything else.
    """
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
    raise ApiError(400, f"{param} is {what}; allowed are {allowed}", param=param)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"half of a surrogate pair ({shown(text[error.start])} at character {error.start})"
        raise ApiError(400, f"{param} holds {what}, which is no text; send both halves or none", param=param) from error
