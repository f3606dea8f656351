"""How a checkpoint is read, beside its place, dtype and device. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadOptions:
    """What goes to transformers' `from_pretrained`: keywords of `LLM`, and of commands under torchrun.

    Attributes:
        tokenizer: the place of another tokenizer than the model's own: a directory or a hub id.
        revision: of a hub id: a branch, a tag or a commit.
        trust_remote_code: run Python code that comes with the checkpoint. Without it nothing of it runs, and nobody is asked.
        gguf_file: a file of that format in the directory or repository; its weights are unpacked to the dtype. Needs the package `gguf`.
        quantization_config: one of transformers, such as `TorchAoConfig`: weights are quantised while they are read.
        expert_parallel: under torchrun each process reads some experts whole, in place of a slice of each.
    """

    tokenizer: str | Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None
    quantization_config: Any = None
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.trust_remote_code, bool):
            raise TypeError(f"trust_remote_code is {self.trust_remote_code!r}; allowed are True and False")
        for name in ("revision", "gguf_file"):
            if not isinstance(value := getattr(self, name), str | None):
                raise TypeError(f"{name} is {value!r}; allowed is a text")

    @property
    def given(self) -> list[str]:
        """The names of what is not as usual."""
        return [name for name, value in vars(self).items() if value is not None and value is not False]
