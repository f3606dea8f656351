"""Writes the model folder: weights, byte tokenizer, model card."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from .corpus import EOS

EOS_TEXT = "<|endoftext|>"
MAX_LENGTH = 2048
# Each message is a paragraph, as in the books.
CHAT_TEMPLATE = """\
{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}{{ '\\n' }}\
A call is <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.{{ '\\n\\n' }}{% endif %}\
{% for message in messages %}{{ '\\n\\n' if not loop.first else '' }}{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>\
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}\
{{ '\\n\\n' if add_generation_prompt else '' }}"""

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# A tiny byte-level Qwen3

A language model with {params:,} parameters, trained from scratch to demonstrate an inference engine.
It imitates the surface of Jane Austen's prose; it knows nothing and follows no instructions.

* Architecture: `Qwen3ForCausalLM`, 6 layers, hidden size 256, 8 query heads and 2 key/value heads of 32,
  layers alternating between a sliding window of 128 tokens and full attention, bfloat16.
* Vocabulary: token id = byte value (0 to 255); `<|endoftext|>` = 256 (start, end and padding).
* Context: up to 2,048 bytes.
* Data: five novels by Jane Austen, public domain (see `examples/data/SOURCE.md`); SHA-256 of the text
  `{corpus_sha256}`. The first 95 % was trained on, the last 5 % held out.
* Training: {steps} steps, {bytes_seen:,} bytes seen, {seconds:.0f} s on {device}; seed {seed}.
* Result, for the stored bfloat16 weights on the held-out text: **{bits_per_byte:.3f} bits per byte** in windows
  of 512, {bits_per_byte_2048:.3f} in windows of 2,048. The checkpoint is the best of the run on that same text
  (step {best_step}), so these figures are slightly optimistic.
* Licence of the weights: Apache-2.0.

A prompt may be any UTF-8 text; begin it with `<|endoftext|>` to start a fresh chapter or paragraph.
The tokenizer has a chat template, in which each message is a paragraph, so that chats can be tried.

Reproduce (no network needed; on a GPU the result is close, not bit-equal):

    {command}

Versions: {versions}.
"""


def byte_symbols() -> list[str]:
    """The printable stand-in that ByteLevel uses for each byte value, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {name: EOS_TEXT for name in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=MAX_LENGTH, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE, **special
    )  # fmt: skip


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Rounds the model to bfloat16 in place, then writes it."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS)
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out, save_jinja_files=False)  # into tokenizer_config.json, with all else


def save_card(record: dict, command: str, out: Path) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    (out / "README.md").write_text(CARD.format(**{**record, "versions": versions}, command=command), encoding="utf-8")
