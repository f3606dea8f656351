"""Which passes may be left out, by name. Imports nothing, since settings are checked with it."""

OPTIONAL = (
    "latent_attention", "experts", "scans", "gated_delta_net", "complex_as_real", "early_logits_gather", "routing", "merge_linears",
    "merge_rotations", "late_views", "linear_float32", "gemv", "add_norm",
)  # fmt: skip


def check_disabled(names: tuple[str, ...]) -> None:
    """Raises ValueError for a pass that cannot be switched off."""
    if unknown := [name for name in names if name not in OPTIONAL]:
        allowed = f"those that can be switched off are {', '.join(OPTIONAL)}; `paged-attn passes` lists all"
        raise ValueError(f"disable_passes has {', '.join(map(repr, unknown))}; {allowed}")
