"""Steps of every causal LM type on fake tensors, as a GPU's engine runs them before the first real one, in float32 and in bfloat16:
`python -m tests.compiled.zoo_ahead [TYPE ...]`. An error here is one at an engine's start."""

from __future__ import annotations

import sys

import pytest
import torch

from paged_attn import UnsupportedError
from tests.compiled.test_steps_ahead import asked
from tests.zoo.build import build
from tests.zoo.configs import TYPES


def main() -> None:
    failed = []
    for model_type in sys.argv[1:] or TYPES:
        try:
            model = build(model_type)
        except Exception as error:  # noqa: BLE001 - as the zoo has it
            print(model_type, f"has no tiny config here: {type(error).__name__}", flush=True)
            continue
        for dtype in (torch.float32, torch.bfloat16):
            try:
                with pytest.MonkeyPatch.context() as undo:
                    said = f"{sum(asked(model.to(dtype), undo).values())} launches"
            except UnsupportedError as refusal:
                said = f"refused: {str(refusal).splitlines()[0][:100]}"
            except Exception as error:  # noqa: BLE001 - reported; the others still run
                failed.append(model_type)
                said = f"{type(error).__name__}: {error}"
            print(model_type, dtype, said, flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
