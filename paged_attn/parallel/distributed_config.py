"""How transformers is told to share out a model, in the words of the version that is installed."""

from __future__ import annotations

from typing import Any


def distributed_config(ranks: int, expert_parallel: bool) -> Any:
    """transformers' DistributedConfig for the plans of a model over all ranks: `tp_plan`, and with `expert_parallel` `ep_plan`, too.

    Up to transformers 5.19 `ep_plan` then stands alone, and what it does not name is whole on all ranks.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    if not expert_parallel:
        return DistributedConfig(tp_plan="auto")
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)
