"""What one attention layer computes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

ChunkPart = Literal["intra", "successive", "inter", "all"]


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer, as proved from the graph. Token positions count from 0 within each request.

    Query i sees key j if all conditions hold that the layer has:

        j <= i                      causal
        i - sliding_window < j      a window, as in Hugging Face: i itself counts
        i // chunk == j // chunk    Llama 4's chunks; `chunk_part` may name others
        j < i + window_ahead        only where it is not causal (ModernBERT)

    Scores are `softcap * tanh(scale * q.k / softcap) + alibi_slope * (j - i)`. If the layer has a table of biases (an operand of the op,
    like sinks), `bias[h, i - j]` or `bias[h, j]` is added.

    Attributes:
        num_q_heads, num_kv_heads: query head h reads KV head `h // (num_q_heads // num_kv_heads)`.
        qk_head_dim, v_head_dim: last dims of q and k, and of v and the output.
        scale: multiplies q.k.
        causal: False means that a query sees the whole request.
        sliding_window, window_ahead, chunk, softcap: None if the layer has none.
        chunk_part: the chunks that a query sees: "intra" its own, "successive" the one before it, "inter" all before that, the three parts
            of dual chunk attention; "all": a `DualChunkSpec`. If a query sees no key, its log-sum-exp is -inf and its output arbitrary.
        has_sinks: a learned logit per query head is added to the softmax's denominator (GPT-OSS).
        alibi_slopes: one slope per query head, or None.
        bias_index: "distance" if a table [q_heads, N] is indexed by i - j (T5; distances past N - 1 read its last entry), "key" if by j,
            None if there is none.
        gives_lse: whether the log-sum-exp of the scores is also wanted.
        kv_layer: the layer id whose KV this layer reads; its own id unless the model shares KV.
        module: path of the module in the model, for messages.
    """

    num_q_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    scale: float
    causal: bool = True
    sliding_window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    bias_index: Literal["distance", "key"] | None = None
    gives_lse: bool = False
    kv_layer: int = 0
    module: str = ""
    window_ahead: int | None = None
    chunk_part: ChunkPart = "intra"

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.module or 'attention'}: {self.num_q_heads} query heads over {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        for name in ("sliding_window", "window_ahead", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{self.module or 'attention'}: {name} is {value}; allowed are None and integers >= 1")
        if self.chunk_part != "intra" and (self.chunk is None or not self.causal):
            raise ValueError(
                f"{self.module or 'attention'}: chunk_part is {self.chunk_part} of an attention that is not causal or has no chunks; "
                "allowed is intra, or a chunk and causal=True"
            )

    @property
    def by_backend(self) -> bool:
        """Whether an attention backend computes the layer."""
        return True

    @property
    def kv_elements(self) -> int:
        """Elements of the pool that one token takes."""
        return self.num_kv_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    def describe(self) -> str:
        """One line: `4 heads over 2 KV, dim 8, causal, window 8, scale 0.354`."""
        dims = f"dim {self.qk_head_dim}"
        if self.v_head_dim != self.qk_head_dim:
            dims += f"/{self.v_head_dim}"
        words = [f"{self.num_q_heads} heads over {self.num_kv_heads} KV", dims, "causal" if self.causal else "bidirectional"]
        limits = (("window", self.sliding_window), ("window ahead", self.window_ahead), ("chunk", self.chunk), ("softcap", self.softcap))
        words += [f"{word} {value:g}" for word, value in limits if value is not None]
        words += [f"{self.chunk_part} chunks"] * (self.chunk_part != "intra")
        words += ["sinks"] * self.has_sinks + ["ALiBi"] * (self.alibi_slopes is not None)
        words += ["log-sum-exp"] * self.gives_lse
        words += [f"bias by {self.bias_index}"] * (self.bias_index is not None)
        return ", ".join([*words, f"scale {self.scale:.4g}"])

    def differences(self, other: AttentionSpec) -> list[str]:
        """Names of the fields that differ, apart from `module`."""
        names = {f.name: None for spec in (self, other) for f in fields(spec) if f.compare and f.name != "module"}
        return [name for name in names if getattr(self, name, None) != getattr(other, name, None)]
