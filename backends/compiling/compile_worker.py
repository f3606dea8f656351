"""`python -m paged_attn.backends.compiling.compile_worker`: compiles kernels into Triton's cache on disk.

It reads pickled `Job`s from stdin one after the other and writes a byte to stdout for each. It ends when stdin ends, or when a job fails.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys

DONE = b"."
NEEDED = ("paged_attn.backends.compiling.compile_job", "triton.compiler", "triton.experimental.gluon")  # import PyTorch too: some seconds


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the engine's process, which may continue
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # Triton's prints must not mix with answers
    for name in NEEDED:
        importlib.import_module(name)
    with contextlib.suppress(EOFError):
        while True:
            pickle.load(jobs).compile()
            answers.write(DONE)


if __name__ == "__main__":
    main()
