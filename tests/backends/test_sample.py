"""The kernels that draw tokens against a plain sort and running sum in whole numbers, on ties, edges of parts and forbidden tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from paged_attn.backends.sampling import sample
from paged_attn.backends.sampling.sample import Sampling, sample_in_place, sample_tokens
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small vocabularies have many parts."""
    monkeypatch.setattr(sample, "PART", 32)


def tail_of(top_p: float) -> float:
    return -1.0 if top_p >= 1.0 else float(np.float32(1.0 - top_p))


def allowed_by_sorting(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[list[int], np.ndarray]:
    """The ids that may be drawn, ascending, and the shares of all ids of the largest one."""
    x = row.float().cpu().numpy()
    shares = np.exp((x - x.max()) * np.float32(1.0 / np.float32(temperature)), dtype=np.float32)
    order = np.lexsort((np.arange(len(x)), x))  # ascending; of equals the lower id first
    if top_k:
        least = x[order[-min(top_k, len(x))]]
        order = order[x[order] >= least]
    if top_p < 1.0:
        running = np.cumsum(shares[order], dtype=np.float64)
        dropped = min(int((running <= tail_of(top_p) * running[-1]).sum()), len(order) - 1)
        order = order[dropped:]
    return sorted(i for i in order.tolist() if shares[i] >= np.float32(min_p) and shares[i] > 0), shares


SETTINGS = [  # temperature, top-k, top-p, min-p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.2),
    (0.7, 5, 1.0, 0.0),
    (1.3, 1, 1.0, 0.0),
    (1.3, 10_000, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (3.0, 0, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.9, 20, 0.8, 0.0),
    (2.0, 40, 0.95, 0.05),
]


def rows_of(settings: list[tuple[float, int, float, float]], uniform: list[float], vocabulary: int, rows: list[int]) -> SamplingTensors:
    first = next((i for i, (_, k, p, _m) in enumerate(settings) if k or p < 1.0), len(settings))
    any_k, any_p = any(k for _, k, _, _ in settings), any(p < 1.0 for _, _, p, _ in settings)
    given = (
        torch.tensor(rows),
        torch.tensor([t for t, _, _, _ in settings]),
        torch.tensor(uniform, dtype=torch.float64),
        torch.tensor([m for _, _, _, m in settings]) if any(m for _, _, _, m in settings) else None,
        torch.tensor([vocabulary - min(k or vocabulary, vocabulary) for _, k, _, _ in settings]) if any_k else None,
        torch.tensor([tail_of(p) for _, _, p, _ in settings], dtype=torch.float64) if any_p else None,
    )
    return SamplingTensors(*(each if each is None else each.to(DEVICE) for each in given), first)


def logits_of(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(DEVICE) * 3
    if kind == "ties":
        return logits.round()
    if kind == "bfloat16":
        return logits.bfloat16()
    if kind == "forbidden":
        logits[:, ::3] = -INF
    return logits


@pytest.mark.parametrize(
    ("kind", "vocabulary"), [("float32", 1), ("ties", 32), ("float32", 33), ("bfloat16", 70), ("ties", 70), ("forbidden", 70)]
)
def test_every_token_at_its_place_of_the_running_sum(kind: str, vocabulary: int) -> None:
    """At uniform numbers in the middle of a token's share that token comes, and only such tokens have a share."""
    logits = logits_of(kind, len(SETTINGS), vocabulary)
    if vocabulary == 1:
        logits = logits.clamp(min=-1.0)
    wanted = []
    for row, setting in enumerate(SETTINGS):
        ids, shares = allowed_by_sorting(logits[row], *setting)
        ends = np.cumsum(shares[ids], dtype=np.float64)
        middles = (ends - shares[ids] / 2) / ends[-1]
        wanted.append([(0.0, ids[0]), *zip(middles.tolist(), ids, strict=True), (1.0 - 2**-53, ids[-1])])
    sampling = Sampling(logits, logits.argmax(-1), rows_of(SETTINGS, [0.0] * len(SETTINGS), vocabulary, list(range(len(SETTINGS)))))
    limits = sampling.find_limits()
    longest = max(map(len, wanted))
    for turn in range(0, longest, max(longest // 12, 1)):
        asked = [of_row[turn % len(of_row)] for of_row in wanted]
        got = sampling.draw(limits, torch.tensor([uniform for uniform, _ in asked], dtype=torch.float64, device=DEVICE))
        assert got.tolist() == [token for _, token in asked], turn


def test_settings_alone_and_rows_in_any_order() -> None:
    """Alone, beside others, from another row of the logits: the same token, whatever filters the others use."""
    logits = logits_of("ties", len(SETTINGS), 60)
    best, uniform = logits.argmax(-1), torch.rand(len(SETTINGS), generator=torch.Generator().manual_seed(2)).tolist()
    together = sample_tokens(logits, best, rows_of(SETTINGS, uniform, 60, list(range(len(SETTINGS))))).tolist()
    turned = list(range(len(SETTINGS)))[::-1]
    assert sample_tokens(logits.flip(0), best.flip(0), rows_of(SETTINGS, uniform, 60, turned)).tolist() == together
    for row, setting in list(enumerate(SETTINGS))[1::3]:
        assert sample_tokens(logits, best, rows_of([setting], [uniform[row]], 60, [row])).tolist() == [together[row]], setting


@pytest.mark.parametrize(("top_p", "first_kept"), [(0.25, 6), (0.5, 4), (0.3, 5), (1e-9, 7), (0.999, 0)])
def test_of_tied_tokens_top_p_drops_the_lower_ids(top_p: float, first_kept: int) -> None:
    for uniform, token in ((0.0, first_kept), (1.0 - 2**-53, 7)):
        of = rows_of([(1.0, 0, top_p, 0.0)], [uniform], 8, [0])
        assert sample_tokens(torch.zeros(1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE), of).item() == token


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e30, 3.4e38])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1.0, -INF, 3.0, 2.0, -0.0, 0.0]], device=DEVICE)
    uniform = [0.0, 0.3, 0.5, 0.7, 0.999999]
    of = rows_of([(temperature, 0, 1.0, 0.0)] * 5 + [(temperature, 0, 0.9, 0.0)] * 5, uniform * 2, 6, [0] * 10)
    tokens = set(sample_tokens(logits, logits.argmax(-1), of).tolist())
    assert tokens == ({2} if temperature < 1 else {0, 2, 3, 4, 5})


def test_rows_that_are_not_finite_end() -> None:
    """Their tokens are thrown away, but nothing may read out of bounds or run for ever, nor touch another row."""
    logits = torch.zeros(4, 70, device=DEVICE)
    logits[0], logits[1, 3], logits[2, 5] = -INF, float("nan"), INF
    best = torch.tensor([-1, -1, -1, 0], device=DEVICE)
    got = sample_tokens(logits, best, rows_of([(1.0, 9, 0.9, 0.1)] * 4, [0.99] * 4, 70, [0, 1, 2, 3]))
    assert bool(((got >= 0) & (got < 70)).all()) and got[3] == 69


@pytest.mark.parametrize("settings", [SETTINGS[:2], SETTINGS])
def test_tokens_take_the_places_of_the_most_likely_ones(settings: list[tuple[float, int, float, float]]) -> None:
    """Of their rows alone, in any order, and of rows that are finite."""
    count = len(settings)
    logits = torch.randn(count + 2, 70, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    best, rows = logits.argmax(-1), list(reversed(range(1, count + 1)))
    best[2] = -1
    of = rows_of(settings, [(i + 0.5) / count for i in range(count)], 70, rows)
    expected = best.clone()
    expected[torch.tensor(rows, device=DEVICE)] = sample_tokens(logits, best, of)
    expected[2] = -1
    sample_in_place(logits, best, of)
    assert torch.equal(best, expected)
    assert not torch.equal(best, logits.argmax(-1))
