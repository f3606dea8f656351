"""Our kernels, for any GPU."""

from __future__ import annotations

from typing import ClassVar

from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.attn_ops.scans.channels import channel_scan_extend, channel_scan_step
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.gated_delta_net import gated_delta_net_step, net_gates, net_norm
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.linear import linear_attention_extend, linear_attention_step
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step
from paged_attn.backends.needs import TRITON, UP_TO_FLOAT32, Needs
from paged_attn.backends.scans.base import OPS, ScansBackend


class TritonScans(ScansBackend):
    name = "triton"
    needs: ClassVar[Needs] = Needs(
        devices=frozenset({"cuda", "hip"}),
        dtypes=UP_TO_FLOAT32,
        requirements=(TRITON,),
        note="prompts and decoding; torch's: prompts of a delta rule with over 256 keys, and of decays by channel alone",
    )
    ops = OPS
    compiles_ahead = True

    def kernels(self) -> Kernels:
        from paged_attn.backends.scans.triton import conv, net, prompts, ssd, steps

        return {
            short_conv_step: conv.step,
            short_conv_extend: conv.extend,
            gated_delta_step: steps.gated_delta,
            gated_delta_net_step: net.step,
            net_gates: net.gates,
            net_norm: net.norm,
            linear_attention_step: steps.linear_attention,
            mamba2_step: steps.mamba2,
            mamba1_step: steps.mamba1,
            gated_delta_extend: prompts.gated_delta,
            kda_extend: prompts.kda,
            linear_attention_extend: ssd.linear_attention,
            mamba2_extend: ssd.mamba2,
            mamba1_extend: prompts.mamba1,
            channel_scan_step: steps.channels,
            channel_scan_extend: prompts.channels,
        }
