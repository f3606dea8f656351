"""`python -m tests.check.run_one FAMILY WRAPPER`: one JSON line with a result for every dtype."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from typing import Any

import torch
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from tests.check.checked import Hooked, Traced, refused
from tests.check.planted import applicable, hook_a_row
from tests.check.wrappers import WRAPPERS
from tests.zoo.build import build
from tests.zoo.run_one import first_sentence

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Wide enough for the blocks in which 4-bit weights are kept.
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
BY_FAMILY: dict[str, dict[str, Any]] = {"bamba": {"mamba_d_head": 16}}  # its heads of state are as wide together as twice the model
UNTRACEABLE = "cannot be captured as one graph"
PACKAGES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors", "peft": "peft"}


def run(family: str, dtype: str, wrapper: str) -> dict[str, Any]:
    """`way` is traced or hooked; `alarm` the words of a refusal without a reason, "" if there is none; `caught` and `missed` errors."""
    package = PACKAGES.get(wrapper.partition(" ")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        return {"way": "", "alarm": "", "reason": f"{package} is not installed"}
    try:
        model = made(family, dtype, wrapper)
        model(input_ids=torch.arange(1, 7)[None])
    except Exception as error:  # noqa: BLE001 - a wrapper that cannot hold the model is a result
        return {"way": "", "alarm": "", "reason": f"the wrapped model itself fails: {type(error).__name__}: {first_sentence(str(error))}"}
    try:
        checked = opened(model)
    except UnsupportedError as refusal:
        return {"way": "", "alarm": "", "reason": f"refused before the check: {first_sentence(str(refusal))}"}
    report: dict[str, Any] = {"way": type(checked).__name__.lower(), "alarm": refused(checked), "reason": "", "caught": [], "missed": []}
    for error in applicable(checked.specs):
        words = with_a_hooked_row(family, dtype, wrapper) if error == "row" else refused(checked, error)
        if words is not None:
            report["caught" if words else "missed"].append(error)
    return report


def made(family: str, dtype: str, wrapper: str) -> nn.Module:
    model = build(family, **WIDTHS, **BY_FAMILY.get(family, {})).to(DTYPES[dtype])
    return WRAPPERS[wrapper](model).eval()


def opened(model: nn.Module) -> Traced | Hooked:
    try:
        return Traced(model)
    except UnsupportedError as refusal:
        if UNTRACEABLE not in str(refusal):
            raise
        return Hooked(model)


def with_a_hooked_row(family: str, dtype: str, wrapper: str) -> str | None:
    """None where the model has nothing to hook."""
    model = made(family, dtype, wrapper)
    if not hook_a_row(model):
        return None
    try:
        return refused(opened(model))
    except UnsupportedError as refusal:
        return str(refusal)


def main(family: str, wrapper: str) -> None:
    torch.set_num_threads(1)
    for dtype in DTYPES:
        try:
            result = run(family, dtype, wrapper)
        except Exception:  # noqa: BLE001 - reported
            result = {"way": "", "alarm": traceback.format_exc().strip().splitlines()[-1][:300], "reason": "crash"}
        print(json.dumps({"family": family, "dtype": dtype, "wrapper": wrapper, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
