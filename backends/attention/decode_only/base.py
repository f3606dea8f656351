"""Common code of backends whose kernels run only decode steps: another backend does the prefill, as in "fa3,trtllm_mha"."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool, once_per_pool
from paged_attn.backends.attention.base import AttentionCall, StoringBackend
from paged_attn.backends.attention.capabilities import DECODE_GRAPHS, LATENTS_ONLY, Capabilities, Feature, OneOf
from paged_attn.backends.needs import HALF

# Of kernels that read rows of latents.
LATENT_DECODE = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=HALF,
    kv_dtypes=HALF,
    features=frozenset({Feature.MLA}),
    head_dims=LATENTS_ONLY,
    latent_dims=(OneOf({512}), OneOf({64})),
    graphs=DECODE_GRAPHS,
    phases=frozenset({"decode"}),
)


@dataclass(slots=True)
class WorkspacePlan:
    """A step of a kernel with a workspace; `page_table` [R, width] int32 is made in the kernel's form on the device (`plan_in_graph`)."""

    batch: Batch
    pool: KVPool
    workspace: Tensor
    page_table: Tensor


class DecodeOnlyBackend(StoringBackend):
    """`prefill_with`: a backend for the other steps on the same GPU, for messages. Plans have `batch` and `pool`."""

    prefill_with: ClassVar[str]

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self.check_once = once_per_pool(self.check_pool)

    @abstractmethod
    def check_pool(self, pool: KVPool) -> None:
        """Raises UnsupportedError for a pool that the kernels cannot read."""

    def forward_extend(self, plan: Any, call: AttentionCall) -> None:
        """Does nothing for a step without requests.

        Raises:
            UnsupportedError: there are requests to extend.
        """
        if plan.batch.num_requests:
            first = self.prefill_with
            raise UnsupportedError(
                f"{self.name} has decode kernels only on this GPU; got a batch in mode {plan.batch.mode.value}: use "
                f"backend='{first},{self.name}', which prefills with {first} and decodes with {self.name}"
            )
