"""One thread per test process: two xdist workers with two OpenMP threads each on two cores spin against each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
