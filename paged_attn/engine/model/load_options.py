"""Where a checkpoint is, determined before any heavy import, and how it is loaded, apart from dtype and device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = "paged_attn/demo_model"
HINT = "Give a directory with config.json and safetensors, a GGUF file, or a hub id like 'org/name'"


@dataclass(frozen=True)
class LoadOptions:
    """What goes to transformers' `from_pretrained`: keywords of `LLM`, and of commands under torchrun.

    Attributes:
        tokenizer: the place of another tokenizer than the model's own: a directory or a hub id.
        has_tokenizer: the caller has one, so that the model's own is not read.
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
    has_tokenizer: bool = False

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


def checked_model_path(path: str | Path, gguf_file: str | None = None) -> tuple[str, str | None]:
    """(the folder with its ~ written out, or a hub id as it is; the GGUF file in it, if that is where config, weights and tokenizer are).

    Args:
        path: also that of a GGUF file itself; `DEMO` is this package's own model wherever there is no folder of that name.

    Raises:
        ValueError: it looks like a folder, and is none that holds a model.
    """
    if gguf_file is None and str(path).endswith(".gguf"):
        file = Path(path).expanduser().absolute()
        path, gguf_file = file.parent, file.name
    name = str(path)
    if name == DEMO and not Path(name).is_dir():
        name = str(Path(__file__).parents[2] / "demo_model")
    if not (isinstance(path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_file()):
        return name, gguf_file
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"no model at {name!r}: not a directory. {HINT}")
    needed = gguf_file or "config.json"
    if not (folder / needed).is_file():
        if (folder / "adapter_config.json").is_file():
            ways = f"loras={{'name': {name!r}}} (--lora name={name})"
            raise ValueError(f"no model at {name!r}: it holds an adapter; give its model, and {ways}")
        raise ValueError(f"no model at {name!r}: it has no {needed}. {HINT}")
    return str(folder), gguf_file
