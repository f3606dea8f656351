"""Which kernels compute recurrences on a GPU."""

from __future__ import annotations

from paged_attn.attn_ops.ops.scans.kernels import use_scan_kernel
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.kda import kda_step
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step
from paged_attn.backends.scans.triton import conv, prompts, steps


def use_scans_on_gpu() -> None:
    """From now on ops on slots of state run by these kernels on a GPU."""
    use_scan_kernel(short_conv_step, conv.step)
    use_scan_kernel(short_conv_extend, conv.extend)
    use_scan_kernel(gated_delta_step, steps.gated_delta)
    use_scan_kernel(kda_step, steps.gated_delta)
    use_scan_kernel(mamba2_step, steps.mamba2)
    use_scan_kernel(mamba1_step, steps.mamba1)
    use_scan_kernel(gated_delta_extend, prompts.gated_delta)
    use_scan_kernel(mamba2_extend, prompts.mamba2)
    use_scan_kernel(mamba1_extend, prompts.mamba1)
