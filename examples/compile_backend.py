"""torch.compile(model, backend="paged_attn"): the same logits as the model itself, and a paged ragged batch under a context."""

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM


def main() -> float:
    model = AutoModelForCausalLM.from_pretrained(str(files("paged_attn.demo_model")), dtype=torch.float32)
    compiled = torch.compile(model, backend="paged_attn")  # by name: nothing of ours is imported
    ids = torch.tensor([list(b"She had"), list(b"He said")])
    with torch.no_grad():
        difference = (compiled(ids).logits - model(ids).logits).abs().max().item()
    print(f"drop-in: logits of a batch of 2 differ from the model's by {difference:g}")
    return difference


if __name__ == "__main__":
    main()
