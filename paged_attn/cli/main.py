"""`paged-attn`: the parser, and how errors are reported."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence

from paged_attn import __version__
from paged_attn.cli.commands import backends, bench, chat, demo, doctor, explain, generate, passes, run_batch, serve, tune, warmup
from paged_attn.cli.parser import Parser
from paged_attn.parallel.torchrun import is_first, leave, num_processes

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
ON_RANKS = (generate, serve)  # may be started by torchrun
COMMANDS = (generate, chat, serve, run_batch, demo, explain, passes, warmup, backends, tune, bench, doctor)


def build_parser() -> argparse.ArgumentParser:
    """The parser with one subcommand per module of COMMANDS; each sets `run`, which takes the parsed arguments and returns a status."""
    parser = Parser(prog="paged-attn", description="Paged attention for unmodified Hugging Face causal LMs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"paged-attn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__, allow_abbrev=False)
        command.set_defaults(run=module.run)
        command.add_argument("-v", "--verbose", action="store_true", help="show log lines, progress bars, and tracebacks of errors")
        if hasattr(module, "add_options"):
            module.add_options(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for an error of the user, 130 after Ctrl-C, else what the command says. Raises
    SystemExit: from argparse, for --help (0) and for arguments that do not parse (2)."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding has not
    try:
        with _as_one_program(args):
            status: int = args.run(args)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError) as error:  # UnsupportedError is a ValueError
        if getattr(args, "verbose", False):
            raise
        print("\n".join([f"paged-attn: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return USER_ERROR


@contextlib.contextmanager
def _as_one_program(args: argparse.Namespace) -> Iterator[None]:
    """Under torchrun the first process alone has a say; the group of processes, if the command made it, ends with the command. Raises
    ValueError: the command does not know ranks."""
    if num_processes() == 1:
        yield
        return
    if args.run not in [module.run for module in ON_RANKS]:
        raise ValueError(f"torchrun started {num_processes()} processes, and this command runs in one; start it without torchrun")
    with contextlib.ExitStack() as silence:
        if not is_first():
            nowhere = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(nowhere))
            silence.enter_context(contextlib.redirect_stderr(nowhere))
        yield
    leave()


if __name__ == "__main__":
    sys.exit(main())
