"""Checks that an unmodified model's logits for a token depend on this and earlier tokens alone: not on later ones, nor on chance. Otherwise
it cannot be served in batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.calling.block_by_block import apart_by_block
from paged_attn.calling.call_signature import takes
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.calling.plain_modes import as_served
from paged_attn.engine.model.rows_of_logits import gives_last_alone, rows_of_logits
from paged_attn.passes.fx.model_facts import max_positions, model_device, model_dtype
from paged_attn.tolerances import MULTIPLE, logits_limit, rounding, row_errors, typical, worst

SEEDS, MORE, MOST_MORE = 3, 24, 256  # seeds tried; tokens added after the first compared row, and at most
SINGLES, FEW = 5, 4  # calls of one token, and of lengths that a trace leaves out
SHORT, LONGEST_BRANCH = (1, 2, 3, 17, 61, 257), 1024
OF_ALL_TOKENS = (
    "something is computed from all tokens of a call at once, such as a factor made of their number, or the scale of numbers that are "
    "quantised as it runs"
)
OF_CHOSEN_TOKENS = (
    "it attends over some of the tokens of a call, such as those that a router rates highest (mixture of depths), and which these are "
    "depends on all of them"
)
OF_CHOICES = "of more than {0} keys, which {0} a query takes changes with the number of tokens, as among equal scores"


def refuse_both_directions(layers: Sequence[AttentionSpec]) -> None:
    """Raises UnsupportedError for layers that attend in both directions."""
    if acausal := [spec.module for spec in layers if not spec.causal]:
        raise UnsupportedError(
            f"{acausal[0] or 'the model'} attends in both directions, so that a later token would change earlier ones: "
            "this model cannot generate token by token"
        )


def refuse_random(model: nn.Module, num_ids: int) -> None:
    """Compare two calls on the same tokens. `num_ids`: token ids are drawn below that. Raises UnsupportedError: most logits are others in
    the second call."""
    with as_served(model), left_as_it_was(model):
        ids = _random_ids(model, min(MORE, max_positions(model) or MORE), num_ids, seed=0)
        one, two = (_logits_if_it_runs(model, ids) for _ in range(2))
    limit = logits_limit(model_dtype(model))
    if one is not None and two is not None and not (error := typical(row_errors(one, two))) <= limit:
        raise UnsupportedError(
            f"{type(model).__name__} gives other logits for the same tokens when it is called again, by {error:.2g} of their size (allowed "
            f"{limit:g}), though it is in evaluation mode: it draws random numbers (F.dropout(x) without training=self.training drops "
            "always), or it keeps something from call to call. So there is no one answer to serve. Nothing was generated."
        )


def refuse_branches(model: nn.Module, from_tokens: int, num_ids: int, excepted: Sequence[int] = ()) -> None:
    """Compare a call that a trace holds for with shorter ones, for which the model branches otherwise, and which the trace serves, too.

    Args:
        from_tokens: in the shortest call that it holds for; 2 if it holds for all. Beyond LONGEST_BRANCH the self-check alone looks.
        excepted: lengths beyond that for which it does not hold, either; FEW of them up to LONGEST_BRANCH are compared.
        num_ids: token ids are drawn below that.

    Raises:
        UnsupportedError: what a token's logits are depends on the number of tokens in that call.
    """
    longest = max_positions(model) or from_tokens + 1
    if gives_last_alone(model):
        return
    _refuse_one_token(model, num_ids)
    _refuse_excepted(model, [count for count in excepted if count <= LONGEST_BRANCH], num_ids)
    if not 2 < from_tokens <= min(LONGEST_BRANCH, longest):
        return
    ends = [count for count in SHORT if count < from_tokens - 1] + [from_tokens - 1]
    with as_served(model), left_as_it_was(model):
        ids = _random_ids(model, from_tokens + 1, num_ids, seed=0)
        whole = _logits_if_it_runs(model, ids[:longest])
        if whole is None:
            return
        for end in ends:
            last = end - max(1, end // 4)  # those that see most
            short = _logits_if_it_runs(model, ids[:end])
            if short is None:  # it takes no calls that are so short, and says nothing of them
                continue
            error = typical(row_errors(whole[last:end], short[last:]))
            limit = logits_limit(model_dtype(model))
            if not error <= limit:
                raise UnsupportedError(
                    f"{type(model).__name__} computes something else in short calls: it branches on the number of tokens, at "
                    f"{from_tokens}, and the logits of a call of {end} are others than those of the same tokens in one of {len(whole)}, by "
                    f"{error:.2g} of their size (allowed {limit:g}). So the logits of a token change as its request grows. Nothing was "
                    "generated."
                )


def _refuse_excepted(model: nn.Module, lengths: Sequence[int], num_ids: int) -> None:
    """Compare calls of some of these lengths with the next longer call that has none of them. Raises as `refuse_branches`."""
    with as_served(model), left_as_it_was(model):
        for count in (*lengths[: FEW - 1], *lengths[FEW - 1 :][-1:]):
            longer, longest = islice((n for n in range(count + 1, count + len(lengths) + 3) if n not in lengths), 2)
            ids, last = _random_ids(model, longest, num_ids, seed=0), count - max(1, count // 4)
            one, other, third = (_logits_if_it_runs(model, ids[:end]) for end in (count, longer, longest))
            if one is None or other is None:
                continue
            error, limit = typical(row_errors(other[last:count], one[last:])), _allowed(model, other, third, last, count)
            if not error <= limit:
                raise UnsupportedError(
                    f"{type(model).__name__} computes something else in calls of some lengths: it branches on the number of tokens, and "
                    f"the logits of a call of {count} are others than those of the same tokens in one of {longer}, by {error:.2g} of their "
                    f"size (allowed {limit:g}). So the logits of a token change as its request grows. Nothing was generated."
                )


def _refuse_one_token(model: nn.Module, num_ids: int) -> None:
    """Compare calls of one token with calls of two: torch.compile traces no call of one, and the trace serves those, too.

    Where whole calls are further apart, blocks are compared, each going on from the same values: rounding grows from block to block, and in
    a deep model with random weights it may be all that is left.

    Raises:
        UnsupportedError: most tokens have other logits alone than before another token.
    """
    errors, limits = [], []
    with as_served(model), left_as_it_was(model):
        for seed in range(SINGLES):
            ids = _random_ids(model, 3, num_ids, seed)
            one, two = (_logits_if_it_runs(model, ids[:count]) for count in (1, 2))
            if one is None or two is None:
                return
            errors.append(row_errors(two[:1], one))
            if not seed and worst(errors[0]) <= logits_limit(model_dtype(model)):
                return  # a router's near-tie may move one token, but no branch leaves one where it was
            limits.append(_allowed(model, two, _logits_if_it_runs(model, ids), 0, 1))
        error, limit = typical(torch.cat(errors)), typical(torch.tensor(limits))
        differs = not error <= limit and not _same_by_block(model, num_ids)
    if differs:
        raise UnsupportedError(
            f"{type(model).__name__} computes something else in a call of one token: its logits there are others than those of the same "
            f"token in a call of two, by {error:.2g} of their size (allowed {limit:g}), as where its forward takes a call of one token for "
            "a step of decoding, though there is no cache. So the logits of a token change as its request grows. Nothing was generated."
        )


def _same_by_block(model: nn.Module, num_ids: int) -> bool:
    """Whether each block computes the same of a token alone as before another token, within what rounding does in a block: in 16 bits an
    eighth of what it may do to logits."""
    dtype = model_dtype(model)
    errors, noises = list[Tensor](), list[Tensor]()
    for seed in range(SINGLES):
        ids = _random_ids(model, 3, num_ids, seed)
        one, two = (apart_by_block(model, partial(_logits_if_it_runs, model), ids[:count], ids[: count + 1]) for count in (1, 2))
        if one is None or two is None or len(one) != len(two):
            return False
        errors.append(torch.stack(one)[:, 0])
        noises.append(torch.stack(two)[:, 0])
    error, noise = (torch.stack(each).median(0).values for each in (errors, noises))  # a router's near-tie may move one token
    limits = torch.full_like(error, MULTIPLE * rounding(dtype if dtype.itemsize > 2 else torch.bfloat16))
    limits[-1] = logits_limit(dtype)
    return bool((error <= torch.maximum(MULTIPLE * noise, limits)).all())


def _allowed(model: nn.Module, one: Tensor, other: Tensor | None, first: int, end: int) -> float:
    """How far logits may be apart where a trace does not hold: as far as rows [first, end) of two calls for which it holds are, at least.

    In 16 bits rounding differs with the number of tokens, and routers of many layers may choose otherwise in most rows.

    Args:
        one, other: the logits [T, V] of the two calls; None: the second does not run.
    """
    limit = logits_limit(model_dtype(model))
    return limit if other is None else max(limit, MULTIPLE * typical(row_errors(one[first:end], other[first:end])))


def refuse_acausal(model: nn.Module, start: int, num_ids: int, because: str) -> None:
    """Compare calls of many tokens with calls of the first of them.

    Args:
        start: the first row that is compared; where a model has no positions for that many there is nothing to compare.
        num_ids: token ids are drawn below that.
        because: for the message: what may do it.

    Raises:
        UnsupportedError: later tokens move most of the earlier rows of logits by more than rounding does; a few rows may move where a
            quantiser or a router is between two steps.
    """
    total = start + max(MORE, min(start, MOST_MORE))
    total = min(total, max_positions(model) or total)
    ends = sorted({end for end in (start + (total - start) // 3, start + 2 * (total - start) // 3, total - 1) if start < end < total})
    with as_served(model), left_as_it_was(model):
        for seed in range(SEEDS if ends else 0):
            ids = _random_ids(model, total, num_ids, seed)
            whole = _logits_if_it_runs(model, ids)
            if whole is None:  # it has no more positions
                return
            limit = logits_limit(model_dtype(model))
            for end in ends:
                error = typical(row_errors(whole[start:end], _logits(model, ids[:end])[start:]))
                if not error <= limit:
                    raise UnsupportedError(
                        f"{type(model).__name__} itself is not causal: in a call of {total} tokens its logits of tokens {start} to "
                        f"{end - 1} are others than in a call of the first {end} alone, by {error:.2g} of their size (allowed "
                        f"{limit:g}): {because}. What it says of a token depends on how many come after it, so that no cache and no "
                        "batch gives its answers. Nothing was generated."
                    )


def _random_ids(model: nn.Module, count: int, num_ids: int, seed: int) -> Tensor:
    return torch.randint(0, num_ids, (count,), generator=torch.Generator().manual_seed(seed)).to(model_device(model))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return rows_of_logits(model, ids, **({"use_cache": False} if takes(model, "use_cache") else {}))


def _logits_if_it_runs(model: nn.Module, ids: Tensor) -> Tensor | None:
    """None if the model's own code refuses so many tokens."""
    with model_may_fail():
        return _logits(model, ids)
    return None
