"""The bytes of tokens that are parts of characters: together they are those of the text, where the tokenizer tells them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.requests.token_texts import byte_of

TEXT = "Zoë, 東京 🙂é\n"


def byte_level() -> Any:
    own = Tokenizer(BPE(vocab={character: byte for character, byte in byte_of().items()}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own)


def byte_fallback() -> Any:
    vocab = {"<unk>": 0, "▁": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "Z": 258, "o": 259}
    own = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_all_tokens_are_those_of_the_text(make: Any) -> None:
    own = make()
    texts = Texts(own, 100)
    ids = own(TEXT).input_ids
    assert bytes(byte for token in ids for byte in texts.bytes_of_token(token) or []).decode() == TEXT
    parts = [token for token in ids if texts.of_token(token) == f"token_id:{token}"]
    assert len(parts) >= 2 + 3 + 3 + 4 + 2 and all(len(texts.bytes_of_token(token) or []) == 1 for token in parts)
    texts.close()


def test_what_no_tokenizer_tells_is_none() -> None:
    own = Tokenizer(WordLevel({"\ufffd": 0, "Ã": 1, "a": 2}, unk_token="a"))
    own.decoder = decoders.Fuse()
    texts = Texts(PreTrainedTokenizerFast(tokenizer_object=own), 100)
    assert [texts.bytes_of_token(token) for token in (0, 1, 2, 99)] == [None, list("Ã".encode()), [ord("a")], None]
    texts.close()
    without = Texts(None, 100)
    assert without.bytes_of_token(3) is None
    without.close()
