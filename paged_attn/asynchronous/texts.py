"""Text to token ids and back: prompts, chat templates, the text of one token."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from paged_attn.asynchronous.errors import TOO_LONG, PromptError
from paged_attn.asynchronous.fair_pool import FairPool
from paged_attn.asynchronous.job import Prompt
from paged_attn.chat.request import ChatRequest
from paged_attn.engine.pooling.plans import pair_tokens
from paged_attn.engine.requests.token_texts import TokenTexts, bytes_of_part
from paged_attn.shown import shown
from paged_attn.truncation import Cut, ids_of_text

T = TypeVar("T")
THREADS, LONG_THREADS = 2, 1
SHORT = 64 << 10  # characters of all prompts of a request that take some 20 ms to tokenize
LIKELY_CHARACTERS = 8  # in one token; longer tokens are rare in text
SLACK = 16  # tokens that a cut in the middle of a word may add


class Texts:
    """A tokenizer for the event loop's use.

    Prompts are tokenized in threads, so a long one holds up neither the event loop nor the engine, nor the short ones of other clients.
    The threads use copies of the tokenizer: those written in Rust refuse to be changed by one thread while another reads them.

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
        self._token_texts = TokenTexts(tokenizer)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def close(self) -> None:
        self._pool.close()

    async def prompts(
        self,
        given: Sequence[str | Sequence[int]],
        client: Hashable,
        add_special_tokens: bool = True,
        param: str | Sequence[str] = "prompt",
        cut: Cut | None = None,
    ) -> list[Prompt]:
        """Texts and lists of token ids, as prompts; `param` is what errors call them, all or each; `cut` is how much is kept of each.
        Raises PromptError: a text that cannot be tokenized, or one that is longer than what can be served."""
        length, names = sum(map(len, given)), [param] * len(given) if isinstance(param, str) else param
        each = list(zip(given, names, strict=True))
        return await self._in_thread(
            client, length, lambda own: [self._prompt(own, one, add_special_tokens, name, cut) for one, name in each]
        )

    async def pairs(
        self, pairs: Sequence[tuple[str, str]], client: Hashable, *, params: tuple[str, str] = ("text_1", "text_2"), cut: Cut | None = None
    ) -> list[Prompt]:
        """Two texts each, as the model's tokenizer joins them; `params` is what errors call them, `cut` how much is kept of each pair.
        Raises PromptError: texts that cannot be tokenized or are too long, or no tokenizer."""
        length = sum(len(text) for pair in pairs for text in pair)
        return await self._in_thread(client, length, lambda own: [self._pair(own, *pair, params, cut) for pair in pairs])

    async def chat(
        self,
        make_request: Callable[[], ChatRequest],
        length: int,
        guide: tuple[str, str] | None,
        client: Hashable,
        cut: Cut | None = None,
        param: str = "messages",
    ) -> Prompt:
        """Messages in the tokenizer's chat template, with the beginning of the answer, and how answers are read.

        Args:
            make_request: called in the thread; what it raises is raised here.
            length: about how many characters there are.
            guide: what the answer follows besides, as `SamplingParams.guide` has it.
            cut: how much is kept of the prompt.
            param: what errors call it.

        Raises:
            ChatError: there is no template, or it refuses the messages; then with its own words.
            PromptError: the prompt is too long.
        """
        return await self._in_thread(client, length, lambda own: self._chat(own, make_request(), guide, cut, param))

    def of_token(self, token_id: int) -> str:
        """A token's text with its leading space; `token_id:N` for one that is not a whole text, such as a part of a character."""
        return self._token_texts(token_id)

    def bytes_of_token(self, token_id: int) -> list[int] | None:
        """The bytes of a token's text, or those that a part of a character is of; None where the tokenizer does not tell."""
        text = self.of_token(token_id)
        if text != f"token_id:{token_id}":
            return list(text.encode())
        return None if self.tokenizer is None else bytes_of_part(self.tokenizer, token_id)

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

    async def text_of(self, token_ids: Sequence[int], client: Hashable) -> str:
        """Their text, special tokens included, made in a thread. Raises PromptError: there is no tokenizer, or an id that no tokenizer
        could have."""
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer, so that tokens have no text", "tokens")
        return await self._in_thread(client, len(token_ids), lambda own: _decoded(own, token_ids))

    async def pieces_of(self, token_ids: Sequence[int], client: Hashable) -> list[str]:
        """The tokenizer's own names of the tokens, made in a thread."""
        return await self._in_thread(client, len(token_ids), lambda own: list(map(str, own.convert_ids_to_tokens(token_ids))))

    def _pair(self, own: Any, first: str, second: str, params: tuple[str, str], cut: Cut | None) -> Prompt:
        if cut is not None:
            first, second = (cut.characters(text, self.max_characters) for text in (first, second))
        for text, param in zip((first, second), params, strict=True):
            self._check_text(text, param)
        try:
            tokens = pair_tokens(own, first, second, cut)
        except ValueError as error:
            raise PromptError(str(error), params[0]) from error
        return Prompt(tokens.ids, None, token_types=tokens.token_types)

    def _prompt(self, own: Any, given: str | Sequence[int], add_special_tokens: bool, param: str, cut: Cut | None) -> Prompt:
        if not isinstance(given, str):
            given = given if cut is None else cut.ids(given)
            if len(given) > 2 * self.room:  # if it is only a little too long, the engine says by how much
                raise self._too_long(len(given), param)
            return Prompt(given)
        if own is None:
            raise PromptError("the prompt is text, but this model has no tokenizer; send token ids", param)
        settings = {} if add_special_tokens else {"add_special_tokens": False}
        return Prompt(self._ids(own, given, param, cut, **settings), given)

    def _chat(self, own: Any, request: ChatRequest, guide: tuple[str, str] | None, cut: Cut | None, param: str) -> Prompt:
        prompt = request.prompt(own, guide)
        form = prompt.form.with_tokenizer(self.tokenizer)
        return Prompt(self._ids(own, prompt.text, param, cut, add_special_tokens=False), prompt.text, form)

    def _ids(self, own: Any, text: str, param: str, cut: Cut | None, **settings: Any) -> list[int]:
        """The token ids of a text. Of one that is far too long and not to be cut only the beginning is tokenized, and it is refused."""
        if cut is not None:
            text = cut.characters(text, self.max_characters)
            self._check_text(text, param)
            return ids_of_text(own, text, cut, **settings)
        self._check_text(text, param)
        head = LIKELY_CHARACTERS * self.room
        if len(text) > head and (count := len(own(text[:head], **settings).input_ids) - SLACK) > self.room:
            raise self._too_long(count, param)
        ids: list[int] = own(text, **settings).input_ids
        return ids

    def _check_text(self, text: str, param: str) -> None:
        if len(text) > self.max_characters:
            most = f"{self.room:,} tokens, for which there is room, are {self.max_characters:,} at most"
            raise PromptError(f"the prompt is too long: {len(text):,} characters; {most}; shorten it", param, TOO_LONG)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"half of a surrogate pair ({shown(text[error.start])} at character {error.start})"
            raise PromptError(f"{param} holds {what}, which is not text; send both halves or none", param) from error

    def _too_long(self, count: int, param: str) -> PromptError:
        what = f"the prompt is too long: {count} tokens > {self.room}, for which there is room, and it may have more; shorten it"
        return PromptError(what, param, TOO_LONG)


def _decoded(own: Any, token_ids: Sequence[int]) -> str:
    if (bad := next((token for token in token_ids if not 0 <= token < len(own)), None)) is not None:
        raise PromptError(f"tokens: got {shown(bad)}; allowed: ids from 0 to {len(own) - 1}", "tokens")
    text: str = own.decode(token_ids, skip_special_tokens=False)
    return text


def length_of(messages: Sequence[Any]) -> int:
    """About how many characters there are, of messages that nobody has looked at."""
    contents = [content for message in messages if isinstance(message, dict) and (content := message.get("content"))]
    parts = [part.get("text") for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))
