"""The text of a single token, and the bytes of a token that is part of a character."""

from __future__ import annotations

import functools
import re
from typing import Any

from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.engine.requests.detokenizer import direct_decoder

REPLACEMENT = "\ufffd"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte-fallback tokens of Llama, Gemma


class TokenTexts:
    """Texts of tokens, each asked for once; `tokenizer` may be None."""

    def __init__(self, tokenizer: Any) -> None:
        self._decoder = direct_decoder(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """A token's text with its leading space; `token_id:N` for one that is not a whole text, such as a part of a character."""
        if (text := self._known.get(token_id)) is None:
            text = self._known[token_id] = self._read(token_id)
        return text

    def _read(self, token_id: int) -> str:
        """From two of them in a row: decoders drop the space before the first word."""
        if self._decoder is None:
            return f"token_id:{token_id}"
        try:
            once, twice = (self._decoder.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        except MODEL_ERRORS:  # some raise for ids that only the model has
            return f"token_id:{token_id}"
        text: str = twice[len(once) :] if twice.startswith(once) else once
        return text if text and REPLACEMENT not in text else f"token_id:{token_id}"


def bytes_of_part(tokenizer: Any, token_id: int) -> list[int] | None:
    """The bytes of a token that is a part of a character: what the tokenizer's own name of it spells, one byte, or characters that stand
    for one each. None where its text is not that of such bytes."""
    try:
        name, text = tokenizer.convert_ids_to_tokens(token_id), tokenizer.decode([token_id], skip_special_tokens=False)
    except MODEL_ERRORS:  # some raise for ids that only the model has
        return None
    if isinstance(name, bytes):  # tiktoken names tokens by bytes
        return list(name)
    if not isinstance(name, str) or not name:
        return None
    if (one := BYTE.fullmatch(name)) is not None:
        return [int(one[1], 16)]
    found = [byte_of().get(character) for character in name]
    spelt = bytes(byte for byte in found if byte is not None)
    return list(spelt) if len(spelt) == len(found) and spelt.decode(errors="replace") == text else None


@functools.cache
def byte_of() -> dict[str, int]:
    """Which byte a character of a byte-level vocabulary stands for: printable ones for themselves, the others from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
