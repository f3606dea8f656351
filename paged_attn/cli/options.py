"""Flags that several commands share, and the settings that they become. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_attn.engine.config import EngineConfig, parse_setting
from paged_attn.engine.model.load_options import LoadOptions
from paged_attn.engine.sampling_params import GUIDES, SamplingParams
from paged_attn.engine.setting_names import GONE, NEW_NAMES, SAME_DTYPE, SAME_SETTING
from paged_attn.parallel.torchrun import num_processes

if TYPE_CHECKING:
    from paged_attn.engine.llm import LLM

DTYPES = ("auto", "float32", "bfloat16", "float16")
_ENGINE = "engine_"
MAX_NEW_TOKENS = SamplingParams().max_new_tokens
METAVARS = {"tuple[str, ...]": "NAME,..."}


def add_run_options(parser: argparse.ArgumentParser, *, dtype: str, max_new_tokens: int | None = None) -> None:
    """Everything that `generate` and `demo` have in common."""
    _add_prompts(parser)
    add_sampling(parser, max_new_tokens)
    parser.add_argument_group("answers").add_argument("-n", "--n", type=int, metavar="N", help="answers to each prompt (default: 1)")
    add_device_options(parser, dtype)
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print text as it comes, prompt after prompt; with --json a line per token")
    output.add_argument(
        "--check", action="store_true", help="compare with the unmodified model's own generate(), token for token; exit 1 if one differs"
    )
    output.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine(parser)


def add_device_options(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Where a model runs, and in which dtype."""
    model_group = parser.add_argument_group("model")
    what = "auto is the checkpoint's own; half, float, bf16, fp16 and fp32 are taken, too (default: %(default)s)"
    model_group.add_argument("--dtype", type=lambda text: SAME_DTYPE.get(text, text), choices=DTYPES, default=dtype, help=what)
    model_group.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """How the checkpoint is read; `load_options` reads them."""
    add = parser.add_argument_group("checkpoint").add_argument
    add("--tokenizer", metavar="DIR_OR_HUB_ID", help="another tokenizer than the model's own")
    add("--revision", metavar="NAME", help="of a hub id: a branch, a tag or a commit")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint; without it nothing of it runs")
    add("--gguf-file", metavar="FILE", help="a GGUF file of the directory or repository (a path to one is a model, too)")
    add("--expert-parallel", action="store_true", help="under torchrun: each process has some experts whole, not a slice of each")


def add_lora(parser: argparse.ArgumentParser) -> None:
    """The adapter of all prompts; `job.load` reads it, with a config that has room for it."""
    what = "an adapter of peft that everything is generated with: the folder that save_pretrained wrote"
    parser.add_argument_group("adapter").add_argument("--lora", metavar="FOLDER", help=what)


def load_options(args: argparse.Namespace) -> LoadOptions:
    names = ("tokenizer", "revision", "trust_remote_code", "gguf_file", "expert_parallel")
    return LoadOptions(**{name: getattr(args, name) for name in names})


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given many times")
    group.add_argument(
        "--prompt-ids", dest="prompt", action="append", type=_read_ids, metavar="N,...", help="the same as token ids; needs no tokenizer"
    )
    group.add_argument("--prompt-file", metavar="FILE", help="a prompt per line, empty lines skipped; - reads standard input")


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int | None) -> None:
    """How tokens are chosen; `sampling_params` reads it, with `check`."""
    group = parser.add_argument_group("sampling", "what is not given is as the checkpoint's generation_config says, else greedy")
    add = group.add_argument
    most = f"at most N new tokens per prompt (default: {MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens})"
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=most)
    add("--max-tokens", dest="max_new_tokens", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--min-tokens", type=int, metavar="N", help="a completion may not end before it has N tokens")
    add("--temperature", type=float, metavar="T", help="0 is greedy")
    add("--top-k", type=int, metavar="K", help="keep the K most likely tokens; 0 or -1 turns it off")
    add("--top-p", type=float, metavar="P", help="keep the most likely tokens that reach probability P; 1 turns it off")
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest; 0 turns it off")
    add("--repetition-penalty", type=float, metavar="R", help="1 turns it off")
    add("--frequency-penalty", type=float, metavar="F", help="per time that the output has a token, -2 to 2; 0 turns it off")
    add("--presence-penalty", type=float, metavar="P", help="for tokens that the output has, -2 to 2; 0 turns it off")
    add("--seed", type=int, metavar="S", help="default: from entropy")
    add("--stop", action="append", metavar="STR", help="text that ends a completion; may be given many times")
    add("--bad-words", action="append", metavar="STR", help="text that may not come; may be given many times")
    add("--ignore-eos", action="store_true", default=None, help="go on after the end-of-sequence token")
    add("--json-schema", metavar="JSON_OR_FILE", type=_schema, help="the answer is JSON of this schema: its text, or a file with it")
    add("--regex", metavar="RE", help="the answer matches this regular expression")
    add("--grammar", metavar="TEXT", help="the answer follows this grammar, in llguidance's dialect of Lark or in GBNF")
    add("--logprobs", type=int, metavar="K", help="log-probability of each new token and of the K likeliest")


def add_chat_template(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--chat-template", metavar="FILE_OR_TEXT", help="a Jinja template instead of the tokenizer's own")


def use_template(llm: LLM, given: str | None) -> None:
    """Let chats have this template. Raises ValueError: it cannot be read, or there is no tokenizer that it could be of."""
    from paged_attn.chat.template import read_template

    if given is not None:
        text = read_template(given)
        if llm.tokenizer is None:
            raise ValueError("--chat-template: this model has no tokenizer, so that it cannot chat")
        llm.tokenizer.chat_template = text


def add_engine(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting of `EngineConfig`; `engine_config` reads them."""
    group = parser.add_argument_group("engine", "each also as environment variable PAGED_ATTN_NAME")
    advanced = parser.add_argument_group("engine, advanced", "settings that few people need; environment variables, too")
    for setting in fields(EngineConfig):
        _add_setting(advanced if setting.metadata["advanced"] else group, setting)
    for old in (*NEW_NAMES, *GONE, *SAME_SETTING):
        flag, dest = f"--{old.replace('_', '-')}", _ENGINE + old
        group.add_argument(flag, dest=dest, nargs="?", const="on", help=argparse.SUPPRESS)
        group.add_argument(f"--no-{old.replace('_', '-')}", dest=dest, action="store_const", const="off", help=argparse.SUPPRESS)


def _add_setting(group: argparse._ArgumentGroup, setting: Field[Any]) -> None:
    flag, dest = f"--{setting.name.replace('_', '-')}", _ENGINE + setting.name
    text = setting.metadata["help"].replace("%%", "%").replace("%", "%%")
    if setting.default is not None and setting.default != ():
        text += f" (default: {_word(setting.default)})"
    if "bool" in str(setting.type):
        group.add_argument(flag, dest=dest, nargs="?", const="on", metavar="on|off", help=text)
        group.add_argument(
            f"--no-{setting.name.replace('_', '-')}", dest=dest, action="store_const", const="off", help=f"same as {flag} off"
        )
    else:
        group.add_argument(
            flag, dest=dest, metavar=METAVARS.get(str(setting.type)) or str(setting.type).removesuffix(" | None").upper(), help=text
        )


def _word(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Settings from flags, over those of the environment. Raises ValueError: a setting that does not parse or is out of range."""
    texts = {name.removeprefix(_ENGINE): text for name, text in vars(args).items() if name.startswith(_ENGINE) and text is not None}
    names = {**NEW_NAMES, **SAME_SETTING}
    try:
        return EngineConfig.from_environment(**{name: parse_setting(names.get(name, name), text) for name, text in texts.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises ValueError for a value out of range, and for --check with what generate() does not have: there is nothing to compare."""
    if args.check and args.temperature:
        raise ValueError(
            f"--check compares greedy tokens and is not defined for --temperature {args.temperature:g}; use --temperature 0 or drop --check"
        )
    if args.check and (args.frequency_penalty or args.presence_penalty):
        raise ValueError("--check compares with generate(), which has no frequency and presence penalties; leave them or --check out")
    if args.check and (guide := next((name for name in GUIDES if getattr(args, name) is not None), None)):
        raise ValueError(f"--check compares with generate(), which has no --{guide.replace('_', '-')}; leave it or --check out")
    if args.check and (args.n or 1) > 1:
        raise ValueError(f"--check compares one greedy answer to each prompt, and -n asks for {args.n}; leave one of them out")
    if args.check and args.bad_words:
        raise ValueError("--check compares with generate(), which is not given --bad-words; leave it or --check out")
    stated = {setting.name: value for setting in fields(SamplingParams) if (value := getattr(args, setting.name, None)) is not None}
    return SamplingParams(**{**stated, "temperature": 0.0} if args.check else stated)


def read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    """What --prompt and --prompt-ids gave, in their order, then the lines of --prompt-file; may be empty. Raises ValueError: the file
    cannot be read as UTF-8 text."""
    prompts = list(args.prompt)
    if args.prompt_file == "-" and num_processes() > 1:
        raise ValueError("--prompt-file -: several processes cannot all read standard input; give a file, or --prompt")
    if args.prompt_file is not None:
        try:
            text = sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt-file {args.prompt_file}: {error}; allowed: UTF-8 text, a prompt on each line") from error
        prompts += [line for line in text.split("\n") if line.strip()]
    return prompts


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are token ids, as in 72,101,108") from error


def _schema(given: str) -> str:
    """The text of a schema, or of the file that has it."""
    if given.lstrip()[:1] in ("{", "[") or given.strip() in ("true", "false"):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{given!r} cannot be read: {error}; allowed: a JSON object, or a file with one") from error


def set_verbosity(verbose: bool) -> None:
    """Warnings only and no progress bars, or our INFO lines and transformers' bars."""
    import transformers.utils.logging as transformers_logging

    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))  # it prints its own
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
    logging.getLogger("paged_attn").setLevel(logging.INFO if verbose else logging.WARNING)
    transformers_logging.set_verbosity_warning()  # its INFO prints whole configs
    if verbose:
        transformers_logging.enable_progress_bar()
    else:
        transformers_logging.disable_progress_bar()
