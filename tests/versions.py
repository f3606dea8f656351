"""What tests expect of the transformers that they run with: CI has the newest, the GPU machine the oldest that is served."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

NEWEST = Version(transformers.__version__) >= Version("5.23")  # between 5.17 and it nothing was tried
newest_only = pytest.mark.skipif(not NEWEST, reason="what it shows was seen with transformers 5.23; docs/limits.md says what 5.17 lacks")
