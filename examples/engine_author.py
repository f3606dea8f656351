"""An engine of your own on the compiled model: allocate a pool, build a batch, enter the context, call the model, sample.

Four requests of different lengths, prefilled together and then decoded in one ragged batch; each stops at its own length.
"""

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM

import paged_attn
from paged_attn import Batch, BatchRequest, KVPool, PageAllocator, forward_context

PAGE_SIZE = 16
PROMPTS = [b"It was a", b"She had never in her life been so", b"The carriage", b"Mrs. Bennet"]
NEW_TOKENS = [12, 30, 20, 25]


class Running:
    """One request: its tokens, its pages, and how many of its tokens have KV."""

    def __init__(self, prompt: bytes, new_tokens: int, allocator: PageAllocator) -> None:
        self.tokens, self.end = list(prompt), len(prompt) + new_tokens
        self.pages = allocator.allocate(allocator.pages_for(self.end))
        self.num_cached = 0

    def share_of_batch(self) -> BatchRequest:
        return BatchRequest(self.tokens[self.num_cached :], self.pages, self.num_cached)


@torch.no_grad()
def main() -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(str(files("paged_attn.demo_model")), dtype=torch.float32)
    compiled = torch.compile(model, backend="paged_attn")
    layers = paged_attn.attention_layers(compiled)  # one trace; every later length shares it
    pool = KVPool(layers, num_pages=64, page_size=PAGE_SIZE, dtype=torch.float32)
    allocator = PageAllocator(pool.num_pages, PAGE_SIZE)
    requests = [Running(prompt, count, allocator) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]
    running = list(requests)
    while running:
        batch = Batch.build([request.share_of_batch() for request in running], PAGE_SIZE)
        with forward_context(batch, pool):
            logits = compiled(**batch.model_inputs()).logits[0]
        next_tokens = logits[batch.logits_rows[: batch.num_logits]].argmax(-1).tolist()
        for request, token in zip(running, next_tokens, strict=True):
            request.num_cached = len(request.tokens)
            request.tokens.append(token)
        for request in [r for r in running if len(r.tokens) == r.end]:
            allocator.free(request.pages)
            running.remove(request)
    assert allocator.num_free == allocator.num_usable
    texts = [bytes(t for t in request.tokens if t < 256).decode(errors="replace") for request in requests]
    print("\n".join(texts))
    return texts


if __name__ == "__main__":
    main()
