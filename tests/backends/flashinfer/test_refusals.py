"""What the FlashInfer backend refuses and declares, and that its stand-in has FlashInfer's own signatures."""

import ast
import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.kinds import kinds_of
from tests.backends.flashinfer import fake_flashinfer
from tests.backends.flashinfer.cases import F16, FEATURES, make_case, spec_of
from tests.backends.problems import run


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"'flashinfer' needs flashinfer 0\.6\.8 .*pip install .*\[flashinfer\]'"):
        FlashInferBackend()


def test_deterministic_and_unknown_kernels_are_refused():
    with pytest.raises(UnsupportedError, match="not batch-invariant"):
        FlashInferBackend(deterministic=True)
    with pytest.raises(ValueError, match="prefill is 'fa4'; allowed are 'auto', 'fa2', 'fa3'"):
        FlashInferBackend(prefill="fa4")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"chunk": 6}, "chunk 6"), ({"alibi_slopes": (0.5, 0.25, 0.1, 0.1)}, "ALiBi slopes"), ({"bias_index": "key"}, "biases by key"),
     ({"softcap": 2.0, "has_sinks": True}, "softcap together with sinks"), ({"v_head_dim": 128}, "head dims 64 of qk and 128 of v")],
)  # fmt: skip
def test_nothing_is_dropped_silently(changes, words, backend):
    case = make_case([(3, 1)], changes=changes)
    with pytest.raises(UnsupportedError, match=f"no kernel for {words}; take backend='auto'"):
        backend.plan(case.batch, case.pool)


def test_pools_that_its_loads_can_not_read():
    spec = AttentionSpec(1, 1, 64, 64, 1.0, kv_layer=1)
    odd = dataclasses.replace(spec, kv_layer=0, qk_head_dim=3, v_head_dim=3)
    with pytest.raises(UnsupportedError, match="16 bytes at a time"):
        kinds_of(KVPool([odd, spec], 4, 1, F16))


def test_queries_of_another_dtype(backend):
    case = make_case([(3, 1), (4, 1)])
    case.query = case.query.bfloat16()
    with pytest.raises(UnsupportedError, match=r"dtype, torch\.float16; got torch\.bfloat16"):
        run(case, backend)


def test_capabilities():
    def reasons(feature="plain", dtype=torch.bfloat16, **changes):
        problem = Problem(spec_of(feature, **changes), dtype, dtype, 16, "cuda", 90)
        return unmet(FlashInferBackend.capabilities, problem)

    for feature in FEATURES:
        assert not reasons(feature), feature
    assert reasons(dtype=torch.float32) and reasons(qk_head_dim=96, v_head_dim=96) and reasons(v_head_dim=128)
    assert reasons(chunk=4) == ["no chunked attention"] and reasons(alibi_slopes=(1.0,) * 4) == ["no ALiBi"]


# ---- the fake is like the real one


REAL = importlib.util.find_spec("flashinfer")


def parameters_of(tree, name):
    """[(name, default)] of a function or `Class.method` of the source; of overloads the last."""
    scope, _, member = name.rpartition(".")
    body = tree.body if not scope else next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == scope).body
    arguments = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == member][-1].args
    positional = [a.arg for a in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    keywords = [(a.arg, ast.literal_eval(d)) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    varied = [(arguments.vararg.arg, None)] if arguments.vararg else []
    return [*zip(positional, defaults, strict=True), *varied, *keywords]


@pytest.mark.skipif(REAL is None, reason="flashinfer is not installed")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("decode.py", f"BatchDecodeWithPagedKVCacheWrapper.{m}") for m in ("__init__", "plan", "run")),
        *(("prefill.py", f"BatchPrefillWithPagedKVCacheWrapper.{m}") for m in ("__init__", "plan", "run")),
        *(("prefill.py", f"BatchPrefillWithRaggedKVCacheWrapper.{m}") for m in ("__init__", "plan", "run")),
        ("cascade.py", "merge_state_in_place"),
        ("decode.py", "trtllm_batch_decode_with_kv_cache"),
        *(("mla/_core.py", f"BatchMLAPagedAttentionWrapper.{m}") for m in ("__init__", "plan", "run")),
        ("mla/_core.py", "trtllm_batch_decode_with_kv_cache_mla"),
    ],
)
def test_the_fake_has_the_real_signatures(file, name):
    """Read from the text of the installed package, which need not load here."""
    tree = ast.parse((Path(REAL.origin).parent / file).read_text())
    mine = fake_flashinfer
    for part in name.split("."):
        mine = getattr(mine, part)
    empty = inspect.Parameter.empty
    found = [(p.name, None if p.default is empty else p.default) for p in inspect.signature(mine).parameters.values()]
    assert found == parameters_of(tree, name)
