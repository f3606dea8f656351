"""Text and JSON of a run."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paged_attn.cli.token_text import ids_text, token_text

if TYPE_CHECKING:
    from paged_attn.cli.check import CheckResult
    from paged_attn.cli.job import Loaded, Numbers, Prompt, Run
    from paged_attn.engine.llm import LLM
    from paged_attn.engine.requests.outputs import Completion, TokenEvent

SHOWN_PROMPT = 200


def bold(text: str) -> str:
    return _styled(text, "1")


def dim(text: str) -> str:
    return _styled(text, "2")


def _styled(text: str, code: str) -> str:
    plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return text if plain else f"\033[{code}m{text}\033[0m"


def width() -> int:
    """Columns to fill: the terminal's, at most 120."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def wrapped(text: str, indent: str) -> str:
    """Paragraphs of `text` filled and indented; line ends of the text are kept."""
    columns = max(width(), 40)
    lines = [textwrap.fill(line, columns, initial_indent=indent, subsequent_indent=indent) or indent for line in text.split("\n")]
    return "\n".join(line.rstrip() for line in lines)


def shortened(text: str) -> str:
    """The end of a long prompt: that is what the completion continues."""
    return text if len(text) <= SHOWN_PROMPT else "... " + text[-SHOWN_PROMPT:].partition(" ")[2]


def heading(number: int, prompt: Prompt) -> str:
    return f"{bold(f'[{number + 1}]')} {dim(shortened(prompt if isinstance(prompt, str) else ids_text(prompt)))}"


def logprob_lines(llm: LLM, completion: Completion) -> str:
    """A line per new token: its log-probability, its text, and the likeliest tokens."""
    lines = []
    for token, known in zip(completion.token_ids, completion.logprobs or (), strict=False):
        best = ", ".join(f"{token_text(llm, i)} {value:.3f}" for i, value in sorted(known.items(), key=lambda item: -item[1]))
        lines.append(f"    {known[token]:8.3f}  {token_text(llm, token):<12} {dim(best)}")
    return "\n".join(lines)


def numbers_line(numbers: Numbers) -> str:
    first = "none" if numbers.first_token_seconds is None else f"{numbers.first_token_seconds:.3f} s"
    return ", ".join(
        [
            f"{numbers.tokens_per_second:,.1f} tokens/s ({numbers.new_tokens} new tokens)",
            f"first token {first} (median)",
            f"{numbers.steps} steps",
            f"prefix cache {numbers.cached_tokens} of {numbers.prompt_tokens} prompt tokens",
            f"KV pool {numbers.kv_pool_bytes / 2**20:,.0f} MiB ({numbers.kv_pool_pages:,} pages of {numbers.page_size})",
            f"{numbers.seconds:.2f} s in total",
        ]
    )


def check_lines(result: CheckResult, numbers: Numbers, num_prompts: int) -> list[str]:
    """The verdict, and the speed of transformers' own generate for comparison."""
    if result.difference is not None:
        verdict = f"check FAILED: {result.difference}"
    else:
        what = "the unmodified model's own greedy generate(), one prompt at a time"
        verdict = f"check passed: all {result.compared_tokens} new tokens equal {what}"
        if result.near_ties:
            verdict = (
                f"check passed: {result.compared_tokens} new tokens equal {what}; {len(result.near_ties)} of {num_prompts} prompts part "
                "from it where the model's own logits of two tokens are nearly equal, which 16 bits round either way (--dtype float32 "
                f"compares all tokens). {result.near_ties[0]}"
            )
    theirs = result.padded_batch_tokens / max(result.padded_batch_seconds, 1e-9)
    compared = f" (paged_attn / transformers = {numbers.tokens_per_second / theirs:.2f})" if theirs else ""
    return [
        verdict,
        f"for comparison: the unmodified model's generate() on the same {num_prompts} prompts as one left-padded batch, same machine, "
        f"device and dtype: {theirs:,.1f} tokens/s in {result.padded_batch_seconds:.2f} s{compared}",
    ]


def document(loaded: Loaded, run: Run, result: CheckResult | None) -> dict[str, Any]:
    """Everything as one JSON-ready dict."""
    from paged_attn.report.inspection import explanation

    numbers = asdict(run.numbers) | {"tokens_per_second": run.numbers.tokens_per_second}
    seconds = {name: getattr(loaded, f"{name}_seconds") for name in ("load", "rewrite", "warm_up")}
    checked = None if result is None else asdict(result) | {"passed": result.passed}
    return {
        "completions": [asdict(completion) for completion in run.completions],
        "numbers": numbers,
        "start_seconds": seconds,
        "explanation": asdict(explanation(loaded.llm)),
        "check": checked,
    }


class StreamPrinter:
    """Prints events live for the first unfinished prompt and holds the others' text back until it is their turn. `as_ids`: the model has no
    tokenizer: token ids stand for text."""

    def __init__(self, prompts: Sequence[Prompt], *, as_ids: bool = False) -> None:
        self.prompts, self._as_ids = prompts, as_ids
        self._held = ["" for _ in prompts]
        self._finished = [False for _ in prompts]
        self._current = -1
        self._advance()

    def __call__(self, number: int, event: TokenEvent) -> None:
        self._finished[number] |= event.finish_reason is not None
        self._held[number] += f"{event.token_id} " if self._as_ids and event.token_id is not None else event.text
        if number == self._current:
            self._flush()

    def _flush(self) -> None:
        print(self._held[self._current], end="", flush=True)
        self._held[self._current] = ""
        if self._finished[self._current]:
            print(flush=True)
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self.prompts):
            if len(self.prompts) > 1:
                print(heading(self._current, self.prompts[self._current]), flush=True)
            self._flush()
