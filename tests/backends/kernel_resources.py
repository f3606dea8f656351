"""What a compiled kernel takes of a multiprocessor, read from its cubin without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources_of(result: Any) -> dict[str, int]:
    """Of what `triton.compile` returned: bytes of shared memory; of a thread, registers at launch and bytes spilled to local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found is not None, usage
    return {"shared": result.metadata.shared, "registers": int(found[1]), "spilled": int(found[2]) + int(found[3])}
