"""The bytes of a token that is a part of a character, where its tokenizer tells them."""

from __future__ import annotations

import functools
import re
from typing import Any

from paged_attn.attn_ops.model_code import MODEL_ERRORS

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of byte fallback: Llama's, Gemma's


def bytes_of_part(tokenizer: Any, token_id: int) -> list[int] | None:
    """What the tokenizer's own name of the token spells: one byte, or characters that stand for one each. None where its text is not
    that of such bytes."""
    try:
        name, text = tokenizer.convert_ids_to_tokens(token_id), tokenizer.decode([token_id], skip_special_tokens=False)
    except MODEL_ERRORS:  # some raise for ids that only the model has
        return None
    if isinstance(name, bytes):  # of tiktoken
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
