"""The training loop: AdamW, warm-up and cosine decay, the best held-out checkpoint kept."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from .corpus import EOS, Corpus
from .model import token_loss

WINDOW, LONG_WINDOW = 512, 2048
LONG_EVERY = 4  # every 4th step uses long windows, so that positions above 512 are trained too
WARM_UP = 0.03  # of the steps
SETUP_STEPS = 2 * LONG_EVERY  # these include compiling both shapes; the schedule's clock starts after them


@dataclass
class Settings:
    steps: int
    batch_size: int
    max_seconds: float
    learning_rate: float
    eval_every: int


@dataclass
class Outcome:
    best_bits: float = math.inf
    best_step: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    recompute: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    bytes_seen: int = 0
    seconds: float = 0.0


@torch.no_grad()
def bits_per_byte(model: nn.Module, corpus: Corpus, window: int, rows: int = 32) -> float:
    was_training = model.training
    model.eval()
    inputs, targets = corpus.held_out_windows(window)
    batches = zip(inputs.split(rows), targets.split(rows), strict=True)
    nats = sum(token_loss(model, *pair, reduction="sum").item() for pair in batches)
    model.train(was_training)
    return nats / math.log(2) / int((targets != EOS).sum())


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=matrices[0].is_cuda)


def rate_factor(step: int, warm_up_steps: float, progress: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, (step + 1) / max(1.0, warm_up_steps)) * (0.02 + 0.98 * cosine)


def batch_shape(step: int, batch_size: int) -> tuple[int, int]:
    if step % LONG_EVERY == LONG_EVERY - 1:
        return max(1, batch_size * WINDOW // LONG_WINDOW), LONG_WINDOW
    return batch_size, WINDOW


def train_step(model: nn.Module, optimizer: torch.optim.AdamW, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    token_loss(model, *batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(model: nn.Module, corpus: Corpus, outcome: Outcome) -> None:
    bits = bits_per_byte(model, corpus, WINDOW)
    outcome.recompute.append({"step": outcome.steps, "seconds": round(outcome.seconds, 1), "bits_per_byte": bits})
    print(f"step {outcome.steps:5d}  {outcome.seconds:6.1f} s  held-out {bits:.4f} bits/byte", flush=True)
    if bits < outcome.best_bits:
        outcome.best_bits, outcome.best_step = bits, outcome.steps
        outcome.best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model: nn.Module, step_model: nn.Module, corpus: Corpus, settings: Settings) -> Outcome:
    """`step_model` may be the compiled `model`. Progress is the larger of steps and time used, so that the
    learning rate has decayed when either runs out."""
    optimizer = make_optimizer(model, settings.learning_rate)
    outcome, begin, setup, progress = Outcome(), time.monotonic(), 0.0, 0.0
    model.train()
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate_factor(outcome.steps, WARM_UP * settings.steps, progress)
        rows, window = batch_shape(outcome.steps, settings.batch_size)
        train_step(step_model, optimizer, corpus.batch(rows, window))
        outcome.steps += 1
        outcome.bytes_seen += rows * window
        if (outcome.steps % 20 == 0 or outcome.steps == SETUP_STEPS) and next(model.parameters()).is_cuda:
            torch.cuda.synchronize()  # otherwise the clock sees kernels queued, not kernels finished
        outcome.seconds = time.monotonic() - begin
        setup = outcome.seconds if outcome.steps <= SETUP_STEPS else setup
        time_used = (outcome.seconds - setup) / max(1.0, settings.max_seconds - setup)
        progress = max(outcome.steps / settings.steps, time_used)
        if outcome.steps % settings.eval_every == 0 or progress >= 1.0:
            evaluate(model, corpus, outcome)
    model.load_state_dict(outcome.best_weights)
    return outcome
