"""The incremental detokenizer: pieces join to the whole, nothing half-done is shown, stop strings cut exactly."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from paged_attn.engine.requests.detokenizer import MAX_WINDOW, IncrementalDetokenizer, MarkedDecoder, direct_decoder

SPECIAL = 256
TEXT = "Hello  wörld, 你好 👩‍👩‍👧 🙂🙂 naïve\n\n\tend "


def byte_level() -> Tokenizer:
    """256 byte symbols (token id = byte) without merges, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = {symbol: bytes_of(symbol) for symbol in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def bytes_of(symbol: str) -> int:
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return kept[kept.index(ord(symbol))] if ord(symbol) < 256 else moved[ord(symbol) - 256]


WORDS = ["▁", "▁▁", "▁▁▁▁", "▁Hello", "▁world", "lo", "w", "a", ",", "▁a", "\n", "é", "你", "🙂"]


def metaspace(byte_fallback: bool = False) -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({word: 257 + i for i, word in enumerate(WORDS)} | {"<eos>": SPECIAL})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    if byte_fallback:  # as Llama 2
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


BYTE_LEVEL, METASPACE, BYTE_FALLBACK = byte_level(), metaspace(), metaspace(byte_fallback=True)
BYT5 = ByT5Tokenizer()
WORD_IDS = list(range(257, 257 + len(WORDS)))


class CountingTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded, self.calls = tokenizer, 0, 0

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.decoded, self.calls = self.decoded + len(ids), self.calls + 1
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def pieces_of(tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.append(token) for token in ids] + [detokenizer.finish()]
    assert detokenizer.text == "".join(pieces)
    return pieces


def run_until_stop(text: str, stop: tuple[str, ...], chunk: int = 1) -> tuple[str, str | None, int]:
    """Feeds characters `chunk` at a time as if each chunk were a token; returns text, stopped, chunks used."""

    class Chunks:
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            return "".join(text[i * chunk : (i + 1) * chunk] for i in ids)

    detokenizer, joined = IncrementalDetokenizer(Chunks(), stop), ""
    for used in range((len(text) + chunk - 1) // chunk):
        joined += detokenizer.append(used)
        if detokenizer.stopped is not None:
            break
    joined += detokenizer.finish()
    assert joined == detokenizer.text
    return joined, detokenizer.stopped, used + 1


def test_the_byte_level_tokenizer_is_what_it_says():
    assert BYTE_LEVEL.decode(list(TEXT.encode())) == TEXT


def test_characters_appear_when_their_last_byte_does():
    assert pieces_of(BYTE_LEVEL, list("a🙂é!".encode())) == ["a", "", "", "", "🙂", "", "é", "!", ""]
    ids = [WORD_IDS[3], *"🙂".encode(), WORD_IDS[7]]
    assert pieces_of(BYTE_FALLBACK, ids) == ["Hello", "", "", "", "🙂", "a", ""]


def test_cut_off_character_comes_out_at_the_end():
    ids = list("ok🙂".encode())[:-1]
    assert pieces_of(BYTE_LEVEL, ids)[-1] == "\ufffd"
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)
    words = [WORD_IDS[3], *ids[2:]]
    assert "".join(pieces_of(BYTE_FALLBACK, words)) == BYTE_FALLBACK.decode(words) == "Hello" + "\ufffd" * 3


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xE2, 0x96, 0x81, 0xF0, 0x9F, 400])), max_size=120),
    st.booleans(),
)
def test_byte_level_pieces_join_to_the_whole(ids, skip):
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special_tokens=skip)) == whole


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from([*WORD_IDS, SPECIAL, 9999]), max_size=60), st.booleans())
@pytest.mark.parametrize("tokenizer", [METASPACE, BYTE_FALLBACK])
def test_sentencepiece_pieces_join_to_the_whole(tokenizer, ids, skip):
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=skip)) == whole


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.sampled_from(WORD_IDS).map(lambda i: [i]), st.text(max_size=4).map(lambda s: list(s.encode())))))
def test_byte_fallback_text_joins_to_the_whole(parts):
    ids = [token for part in parts for token in part]
    assert "".join(pieces_of(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.integers(0, 256), st.sampled_from(WORD_IDS)), max_size=120))
def test_invalid_byte_fallback_does_no_harm(ids):
    after = "".join(pieces_of(BYTE_FALLBACK, [*ids, WORD_IDS[3], *"🙂".encode()]))
    assert after.endswith("Hello🙂")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE])
def test_works_with_a_transformers_tokenizer(tokenizer):
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    ids = [SPECIAL, *(TEXT.encode() if tokenizer is BYTE_LEVEL else WORD_IDS), SPECIAL]
    for skip in (True, False):
        assert "".join(pieces_of(wrapped, ids, skip_special_tokens=skip)) == wrapped.decode(ids, skip_special_tokens=skip)


class Shouting(PreTrainedTokenizerFast):
    def decode(self, *args: Any, **settings: Any) -> str:
        return super().decode(*args, **settings).upper()


def test_the_tokenizer_beneath_decodes_where_it_gives_the_same_text():
    words = models.WordLevel({word: number for number, word in enumerate([*"abcdefghijk.?!,'", "n't", "'m", "'s", "'ve", "'re", "x"])}, "x")
    spaced = Tokenizer(words)
    spaced.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for inside, cleans in [(byte_level(), False), (byte_level(), True), (metaspace(True), False), (spaced, False)]:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inside, clean_up_tokenization_spaces=cleans)
        direct = direct_decoder(tokenizer)
        assert isinstance(direct, Tokenizer)
        for ids in [[1, 2, 3], [0, 5], [7]]:
            assert all(
                direct.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)
            )
    cleaning = PreTrainedTokenizerFast(tokenizer_object=spaced, clean_up_tokenization_spaces=True)
    patched = PreTrainedTokenizerFast(tokenizer_object=byte_level(), clean_up_tokenization_spaces=False)
    patched.decode = lambda ids, **settings: "what its owner put there"
    kept = [cleaning, patched, Shouting(tokenizer_object=byte_level(), clean_up_tokenization_spaces=False), byte_level(), object(), None]
    assert all(direct_decoder(each) is each for each in kept)


def of_words(suffixes: bool = False) -> Tokenizer:
    """Its decoder puts a space in front of every word; with `suffixes`, those that begin with ## have none."""
    words = ["x", *"nrstv.?!,'", "n't", "'m", "'s", "don", "the", *(["##s", "##ing"] if suffixes else [])]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer((models.WordPiece if suffixes else models.WordLevel)(numbers, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if suffixes:
        tokenizer.decoder = decoders.WordPiece("##", True)
    return tokenizer


def of_pieces() -> Tokenizer:
    """Spaces are tokens, and parts of tokens."""
    pieces = ["<unk>", "▁", "▁x", "x", "n", "t", "'", "▁'", ".", "▁.", "?", "s", "'s", "▁n", "r", "e"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 15), max_size=80))
@pytest.mark.parametrize("inside", [of_words(), of_words(suffixes=True), of_pieces()])
def test_pieces_that_are_cleaned_up_join_to_the_whole(inside, ids):
    """Of "x" and " ." becomes "x.": with the space shown, the end was where it had been, and the text lacked the full stop."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inside, clean_up_tokenization_spaces=True)
    assert direct_decoder(tokenizer) is tokenizer
    if "  " not in tokenizer.decode(ids, clean_up_tokenization_spaces=False):
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
        assert "".join(pieces_of(MarkedDecoder(tokenizer, frozenset()), ids)) == tokenizer.decode(ids)


def test_whether_spaces_are_taken_out_is_asked_of_the_tokenizer_itself():
    """Not of what it makes of a text: this one drops the spaces of that text, and keeps those inside its tokens."""
    inside = Tokenizer(models.BPE(vocab={"x": 0, "x▁.": 1}, merges=[]))
    inside.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inside, clean_up_tokenization_spaces=True)
    assert isinstance(direct_decoder(tokenizer), Tokenizer)
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode([1]) == "x." and direct_decoder(tokenizer) is tokenizer


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.text(max_size=4).map(lambda s: list(s.encode())), st.integers(0, 255).map(lambda i: [i])), max_size=20))
def test_characters_whose_first_bytes_give_no_text_at_all(parts):
    """Of an incomplete character ByT5 shows nothing; each of its bytes was taken for a token that never gives text, and left out."""
    ids = [BYT5.offset + byte for part in parts for byte in [*part, -2]]  # ... and an end token, which is skipped
    assert "".join(pieces_of(BYT5, ids)) == BYT5.decode(ids, skip_special_tokens=True)
    text = BYT5(TEXT, add_special_tokens=False).input_ids
    assert [piece for piece in pieces_of(BYT5, text) if piece] == list(TEXT)


def test_skipped_tokens_do_not_pile_up():
    counting = CountingTokenizer(BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(counting)
    pieces = [detokenizer.append(token) for token in [*b"a", *[SPECIAL] * 500, *b"b"]]
    assert "".join(pieces) == "ab" and counting.decoded < 502 * 20


def test_leading_spaces_and_specials_in_between():
    ids = [SPECIAL, WORD_IDS[0], SPECIAL, WORD_IDS[3], SPECIAL, WORD_IDS[0], WORD_IDS[0], WORD_IDS[4]]
    for tokenizer in (METASPACE, BYTE_FALLBACK):
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "ids",
    [
        list(TEXT.encode()) * 40,
        [0xFF] * 2000,
        [SPECIAL] * 2000,
        [0xE2, 0x96] * 1000,
        [65, 0xF0] + [SPECIAL, 9999] * 1000,
        random.Random(0).choices(range(128, 256), k=2000),
    ],
)
def test_work_per_token_is_bounded(ids):
    counting = CountingTokenizer(BYTE_LEVEL)
    assert "".join(pieces_of(counting, ids)) == BYTE_LEVEL.decode(ids)
    assert counting.calls <= 3 * len(ids) and counting.decoded <= (MAX_WINDOW + 2) * len(ids)


def test_no_tokenizer_gives_no_text():
    detokenizer = IncrementalDetokenizer(None)
    assert [detokenizer.append(5), detokenizer.append(6), detokenizer.finish(), detokenizer.text] == [""] * 4
    with pytest.raises(ValueError, match="without a tokenizer"):
        IncrementalDetokenizer(None, stop=("a",))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("one END two", ("END",), "one ", "END"),
        ("one EN", ("END",), "one EN", None),  # an unfinished stop string is text after all
        ("one EEEND", ("END",), "one EE", "END"),
        ("aabaabaac", ("aabaac",), "aab", "aabaac"),
        ("xabcd", ("abc", "bc"), "x", "abc"),  # complete together: the longest
        ("xabcd", ("bc", "abcd"), "xa", "bc"),  # the first to be complete
        ("hello world", ("world", "lo"), "hel", "lo"),
        ("END", ("END",), "", "END"),
        ("a\n\nb", ("\n\n", "b"), "a", "\n\n"),
        ("ab", ("zz",), "ab", None),
    ],
)
def test_stop_strings_whatever_the_tokens(text, stop, expected, stopped, chunk):
    joined, hit, used = run_until_stop(text, stop, chunk)
    assert (joined, hit) == (expected, stopped)
    if hit is not None:  # no token more than needed
        end = min(text.find(s) + len(s) for s in stop if s in text)
        assert used == -(-end // chunk)


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    st.integers(1, 7),
)
def test_stop_strings_against_brute_force(text, stop, chunk):
    ends = [(end, text[:end].find(s)) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    expected = text if not ends else text[: min((end, at) for end, at in ends)[1]]
    if text:
        assert run_until_stop(text, stop, chunk)[0] == expected


def test_a_stop_prefix_is_held_and_released_when_it_is_none():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("END",))
    assert [detokenizer.append(byte) for byte in b"xENxED"] == ["x", "", "", "ENx", "", "ED"]


def test_stop_string_with_a_character_split_over_tokens():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("🙂!",))
    assert "".join(detokenizer.append(byte) for byte in "a🙂 b🙂!".encode()) == "a🙂 b"
    assert detokenizer.stopped == "🙂!" and detokenizer.finish() == ""


@pytest.mark.parametrize("stop", [("2",), ("2", "@@@@"), ("x2", "2l", "@@@@@@")])
def test_a_stop_string_that_came_before_min_tokens_stays_whatever_others_hold_back(stop):
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=stop, min_tokens=4)
    text = "".join(detokenizer.append(byte) for byte in b"x2l-{2") + detokenizer.finish()
    assert text == ("x2l-{" if "2" in stop else "x2l-{2")
    assert detokenizer.stopped == ("2" if "2" in stop else None)


def test_a_stop_string_may_begin_before_min_tokens():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=("abcd", "b"), min_tokens=3)
    assert "".join(detokenizer.append(byte) for byte in b"abcd") == "" and detokenizer.stopped == "abcd"


def test_appending_after_the_end_is_refused():
    stopped = IncrementalDetokenizer(BYTE_LEVEL, stop=("b",))
    assert stopped.append(ord("a")) + stopped.append(ord("b")) == "a"
    with pytest.raises(RuntimeError, match="stop string 'b' was hit"):
        stopped.append(ord("c"))
    finished = IncrementalDetokenizer(BYTE_LEVEL)
    assert finished.finish() == finished.finish() == ""
    with pytest.raises(RuntimeError, match="finish"):
        finished.append(1)


@pytest.mark.parametrize("stop", ["END", ("a", "")])
def test_bad_stop_strings(stop):
    with pytest.raises(ValueError, match="stop: got"):
        IncrementalDetokenizer(BYTE_LEVEL, stop=stop)
