"""The garbage collector rests inside, and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from paged_attn.engine.tracing.while_tracing import no_collections


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_afterwards_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), no_collections():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
