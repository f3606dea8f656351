"""`paged-attn chat`: talk with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends; /new begins a new conversation."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paged_attn.cli import report
from paged_attn.cli.options import (
    add_chat_template,
    add_checkpoint_options,
    add_device_options,
    add_engine,
    add_lora,
    add_sampling,
    engine_config,
    load_options,
    sampling_params,
    set_verbosity,
    use_template,
)  # fmt: skip

if TYPE_CHECKING:
    from paged_attn.chat.parts import ChatMessage
    from paged_attn.cli.parser import Parser
    from paged_attn.engine.llm import LLM
    from paged_attn.engine.sampling_params import SamplingParams

HELP = "talk with a model in the terminal"
NEW = "/new"
_COMMAND = re.compile(r"/[a-z?]*")


def add_options(parser: Parser) -> None:
    parser.add_model()
    add_checkpoint_options(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="the system message that each conversation begins with")
    add_chat_template(group)
    add_sampling(parser, max_new_tokens=1024)
    add_device_options(parser, dtype="auto")
    add_lora(parser)
    add_engine(parser)
    parser.set_defaults(check=False)


def run(args: argparse.Namespace) -> int:
    """Until standard input ends. Answers go to stdout, all else to stderr. Raises ValueError: a setting out of range, or a model that
    cannot be loaded or cannot chat."""
    params, config = sampling_params(args), engine_config(args)
    if args.lora is not None:
        config = config.with_adapters(1)
    print(f"loading {args.model}", file=sys.stderr, flush=True)
    set_verbosity(args.verbose)
    from paged_attn.chat.template import template_text
    from paged_attn.cli.job import load, where_it_runs

    llm = load(args.model, args.dtype, args.device, config, load_options(args), lora=args.lora).llm
    use_template(llm, args.chat_template)
    template_text(llm.tokenizer, None, has_tools=False)
    print(f"{where_it_runs(llm)}. Ctrl-C stops an answer, Ctrl-D ends, {NEW} starts over.", file=sys.stderr, flush=True)
    Conversation(llm, params, args.system, args.lora).run()
    return 0


class Conversation:
    """Messages so far, and whoever goes on with them.

    Args:
        system: the first message of each conversation, if any.
        lora: the name of a loaded adapter that answers.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, lora: str | None = None) -> None:
        self._llm, self._params, self._lora = llm, params, lora
        self._beginning: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._beginning)

    def run(self) -> None:
        """Read a line, answer it, and so on until there is none."""
        while (line := _read_line()) is not None:
            if line.strip() == NEW:
                self.messages = list(self._beginning)
                print("a new conversation", file=sys.stderr, flush=True)
            elif _COMMAND.fullmatch(line.rstrip()):
                what = f"there is no {line.rstrip()}; {NEW} begins a new conversation, Ctrl-D ends; a space before it says it to the model"
                print(f"paged-attn: {what}", file=sys.stderr, flush=True)
            elif line.strip():
                self.say(line)

    def say(self, text: str) -> None:
        """Print the answer as it comes. What was said when it was stopped stays said; a message that is refused was never said."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            self.messages = [*asked, self._answer(asked)]
        except ValueError as error:
            print(f"paged-attn: error: {error}; {NEW} begins a new conversation", file=sys.stderr, flush=True)

    def _answer(self, messages: list[Any]) -> ChatMessage:
        from paged_attn.chat.parts import ChatMessage, Content, Part, ToolCall

        parts: list[Part] = []
        is_cut = False
        with _interrupts() as interrupted:
            events = self._llm.stream_chat(messages, self._params, lora=self._lora)
            for event in events:
                is_cut |= event.finish_reason == "length"
                if interrupted.is_set():
                    break
                if event.part is None:
                    continue
                parts.append(event.part)
                if isinstance(event.part, Content):
                    is_first = not any(isinstance(part, Content) for part in parts[:-1])
                    print("\n" * (is_first and len(parts) > 1) + event.part.text, end="", flush=True)
                elif isinstance(event.part, ToolCall):
                    print(f"{event.part.name}({event.part.arguments})", end="", flush=True)
                else:
                    print(report.dim(event.part.text), end="", flush=True)
            events.close()
        print(" [stopped]" if interrupted.is_set() else "", flush=True)
        if is_cut and not interrupted.is_set():
            print(f"paged-attn: cut after {self._params.max_new_tokens} tokens; --max-new-tokens gives more", file=sys.stderr, flush=True)
        return ChatMessage.of(parts)


def _read_line() -> str | None:
    """None at the end of standard input. Ctrl-C gives a new line."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):  # not everywhere
            import readline  # noqa: F401 (with it input() edits a line and has those before)
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(flush=True)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Inside, Ctrl-C sets the event, and interrupts no step of the engine."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
