"""Questions, and what the unmodified model answers to each alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.attack.victim import MODEL
from tests.server.serving import TEMPLATE

MARGIN = 2e-3  # between the logits of the best token and the next: less may be rounded either way in another batch
NEW = 24
WORDS = ("It was a truth", "She had", "The house stood", "Mr. Darcy", "In vain", "No one who", "There is nothing", "A letter came")


@dataclass(frozen=True)
class Question:
    """A request, and the token ids and the text of its answer."""

    path: str
    body: dict[str, Any]
    ids: list[int]


def questions(count: int, seed: int) -> list[Question]:
    """Completions of texts and token ids, and chats; prompts share beginnings."""
    rng, model = random.Random(seed), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    made: list[Question] = []
    while len(made) < count:
        text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 2, 5, 12])))
        kind = rng.choice(["text", "ids", "chat"])
        if kind == "chat":
            messages = [{"role": "user", "content": text}]
            ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
        else:
            ids = tokenizer(text)
        answer = _answer(model, ids.input_ids)
        if not answer:
            continue
        body: dict[str, Any] = {"max_tokens": len(answer), "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        if kind == "chat":
            made.append(Question("/v1/chat/completions", {**body, "messages": messages}, answer))
        else:
            made.append(Question("/v1/completions", {**body, "prompt": text if kind == "text" else ids.input_ids}, answer))
    return made


def _answer(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens as long as none of them is a near tie."""
    ids, answer = torch.tensor([prompt]), []
    with torch.no_grad():
        for _ in range(NEW):
            best = model(ids).logits[0, -1].float().topk(2)
            if float(best.values[0] - best.values[1]) < MARGIN:
                break
            answer.append(int(best.indices[0]))
            ids = torch.cat([ids, best.indices[:1].view(1, 1)], 1)
    return answer
