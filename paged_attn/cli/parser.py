"""The parser of all commands. Errors are one line, with the closest flag, instead of a screen of usage."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection
from typing import Any, NoReturn

from paged_attn.engine.setting_names import OTHER_PARAM, OTHER_SETTING

TOLD = {**OTHER_PARAM, **OTHER_SETTING}

MODEL = "a directory, a GGUF file, or a hub id like org/name"
NEAR = 0.75  # similarity from which a flag is suggested: `--model` is not `--pdl`


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line. Those of a command are told by the command, which knows its flags."""

    needs_model = False

    def add_model(self, what: str = MODEL) -> None:
        """The model, as `MODEL` or `--model MODEL`. A positional argument of argparse would take the value of a misspelt flag."""
        self.add_argument("--model", metavar="MODEL", help=f"{what}; also without the flag")
        self.usage, self.needs_model = "%(prog)s MODEL [options]", True

    def error(self, message: str) -> NoReturn:
        """As argparse does, without the usage, which `--help` prints."""
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Nothing unknown is left over: a command's parser is asked by this method, and what it left would be an error without its name."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if hasattr(parsed, "model") and parsed.model is None:
            words = [word for word in unknown if word != "--"]
            if len(words) == 1 and not words[0].startswith("-"):
                parsed.model, unknown = words[0], []
        if unknown:
            self.error(no_such(unknown, [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]))
        if self.needs_model and not parsed.model:
            self.error(f"no model; give MODEL first: {MODEL}")
        return parsed, unknown


def no_such(unknown: list[str], flags: Collection[str]) -> str:
    """What to say of arguments that no flag takes; `flags`: those that there are."""
    flag = next((text for text in unknown if text.startswith("-")), None)
    if flag is None:
        return f"unexpected {' '.join(unknown)!r}; a value with spaces needs quotes, and all else a flag before it"
    name, known = flag.partition("=")[0], [flag for flag in flags if flag.startswith("--")]
    told = TOLD.get(name.lstrip("-").replace("-", "_"))
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    hint = told or (f"did you mean {near[0]}?" if near else "")
    return f"there is no {name}{f'; {hint}' if hint else ''}"
