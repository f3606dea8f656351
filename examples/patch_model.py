"""paged_attn.patch(model): the Hugging Face attention hook without torch.compile; the model is restored at the end."""

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM

import paged_attn


def main() -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(str(files("paged_attn.demo_model")), dtype=torch.float32)
    with torch.no_grad(), paged_attn.patch(model) as patched:
        pool = paged_attn.KVPool(patched.layers, num_pages=8, page_size=16, dtype=torch.float32)
        requests = [paged_attn.BatchRequest(b"It was a", pages=[1]), paged_attn.BatchRequest(b"She", pages=[2])]
        batch = paged_attn.Batch.build(requests, page_size=16)
        with paged_attn.forward_context(batch, pool):
            logits = model(**batch.model_inputs()).logits[0, batch.logits_rows[: batch.num_logits]]
    print("next bytes:", bytes(logits.argmax(-1).tolist()))
    return logits.argmax(-1).tolist()


if __name__ == "__main__":
    main()
