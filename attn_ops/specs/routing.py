"""Which experts a token gets, and with which weights, from its router's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Score = Literal["none", "softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """From logits [T, E] to k experts for each token.

    Attributes:
        top_k: experts per token.
        score: computes experts' scores from the token's logits, in float32.
        after: applied to the scores of the chosen experts ("softmax": among them only).
        groups: the number of groups of experts; experts are chosen only from the best groups (1: from all).
        top_groups: how many groups are chosen.
        group_best: a group's score is the sum of this many of its best experts' scores.
        hidden: replaces the scores of other groups in the choice.
        renormalise: the weights are divided by their sum plus `eps`.
        scale: then multiplied with this.
        rounded: scores, and their sums with the bias, have the type of the logits (with that of the bias), not float32.
    """

    top_k: int
    score: Score = "softmax"
    after: Score = "none"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    hidden: float = float("-inf")
    renormalise: bool = False
    eps: float = 0.0
    scale: float = 1.0
    rounded: bool = False

    def describe(self) -> str:
        """`top 8 of softmax, renormalised`, for people."""
        groups = f" in the best {self.top_groups} of {self.groups} groups" if self.groups > 1 else ""
        after = "" if self.after == "none" else f", {self.after} of the chosen"
        scale = f", times {self.scale:g}" if self.scale != 1 else ""
        score = ("logits" if self.score == "none" else self.score) + " in the type of the logits" * self.rounded
        return f"top {self.top_k} of {score}{groups}{after}{', renormalised' * self.renormalise}{scale}"

    def __call__(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits [T, E], bias [E] or None, which only affects the choice -> weights [T, k] in float32, ids [T, k] in int64.

        Ties are broken as torch.topk does on this device.
        """
        scores = logits.float()
        if self.score != "none":
            scores = scores.softmax(-1) if self.score == "softmax" else scores.sigmoid()
        if self.rounded:
            scores = scores.to(logits.dtype)
        choice = (scores if bias is None else scores + bias).float()
        scores = scores.float()
        if self.groups > 1:
            grouped = choice.view(len(choice), self.groups, -1)
            worth = grouped.topk(self.group_best, dim=-1).values.sum(-1)
            taken = torch.zeros_like(worth).scatter_(1, worth.topk(self.top_groups, dim=-1, sorted=False).indices, 1).bool()
            choice = grouped.masked_fill(~taken[:, :, None], self.hidden).view(choice.shape)
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.after != "none":
            weights = weights.softmax(-1) if self.after == "softmax" else weights.sigmoid()
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return weights * self.scale, ids
