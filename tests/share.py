"""A share of the tests: `PAGED_ATTN_TEST_SHARE=1/2` runs the first half, 2/2 the other one.

`.ci/run` runs one sixth of the slow tests, chosen by the time of the commit, to end in 25 minutes: all of them take two cores an hour, and
70 minutes on the slowest machines that CI has had. `make test-slow` runs them all. Which share a case is in depends on its name alone;
1/2 is 1/6, 3/6 and 5/6.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable


def in_share(share: str) -> Callable[[str], bool]:
    """Whether a node is in this share; an empty one has all.

    Raises:
        ValueError: it is not `k/n` with 1 <= k <= n.
    """
    if not share:
        return lambda node: True
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"PAGED_ATTN_TEST_SHARE: got {share!r}; allowed: k/n with 1 <= k <= n, such as 1/2")
    return lambda node: zlib.crc32(node.encode()) % int(match[2]) == int(match[1]) - 1
