"""What a model says by itself: greedy tokens with its own `generate`, and by a loop without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tokens = list[list[int]]


@dataclass(frozen=True)
class Oracle:
    """`generated` and `looped` hold new tokens by prompt, or None with the words of the failure in `failures`."""

    generated: Tokens | None
    looped: Tokens | None
    failures: tuple[str, ...]
    sensitivity: float  # share of the new tokens that change when one token of the prompt changes

    @property
    def truth(self) -> Tokens | None:
        return self.generated if self.generated is not None else self.looped

    @property
    def disagrees(self) -> bool:
        return None not in (self.generated, self.looped) and self.generated != self.looped

    @property
    def weakness(self) -> str:
        """Why equal tokens would prove little, or nothing."""
        if self.truth is None:
            return "the unmodified model gives no tokens: " + "; ".join(self.failures)
        if len({token for tokens in self.truth for token in tokens}) == 1:
            return "the tiny model gives one token whatever the prompt"
        if not self.sensitivity:
            return "the tiny model's tokens do not depend on the prompt"
        return ""


def generate(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


def next_tokens(model: nn.Module, ids: Sequence[int]) -> list[int]:
    """The most likely next token after every token, from one call without a cache."""
    device = next(model.parameters()).device
    with torch.no_grad():
        tokens: list[int] = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0].argmax(-1).tolist()
    return tokens


def loop(model: nn.Module, prompt: Sequence[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(next_tokens(model, ids)[-1])
    return ids[len(prompt) :]


def sensitivity(model: nn.Module, prompts: Tokens, truth: Tokens) -> float:
    """Change the token before a prompt's last one, and count which of the following tokens are chosen otherwise."""
    changed = total = 0
    for prompt, tokens in zip(prompts, truth, strict=True):
        if len(prompt) > 1:
            ids = prompt + tokens[:-1]
            other = ids.copy()
            other[len(prompt) - 2] = 2 if ids[len(prompt) - 2] != 2 else 3
            pairs = zip(next_tokens(model, ids)[-len(tokens) :], next_tokens(model, other)[-len(tokens) :], strict=True)
            changed += sum(a != b for a, b in pairs)
            total += len(tokens)
    return changed / max(total, 1)


def oracle(model: nn.Module, prompts: Tokens, new_tokens: int) -> Oracle:
    results: list[Tokens | None] = []
    failures = []
    for name, function in (("generate", generate), ("loop", loop)):
        try:
            found = [function(model, prompt, new_tokens) for prompt in prompts]
            if wrong := {len(tokens) for tokens in found} - {new_tokens}:
                raise ValueError(f"{min(wrong)} new tokens instead of {new_tokens}")
            results.append(found)
        except Exception as error:  # noqa: BLE001 - a model that fails by itself is a result
            lines = str(error).strip().splitlines() or [""]
            failures.append(f"{name} raises {type(error).__name__}: {lines[0][:200]}")
            results.append(None)
    generated, looped = results
    truth = generated if generated is not None else looped
    try:
        share = sensitivity(model, prompts, truth) if truth is not None else 0.0
    except Exception:  # noqa: BLE001 - no call without a cache: only generate knows how to call it
        share = 1.0
    return Oracle(generated, looped, tuple(failures), share)
