"""Hugging Face's own generate on paged KV: beams share pages, and a prompt that was computed once goes on in several ways.

Run: python examples/generate_on_pages.py
"""

from __future__ import annotations

import copy
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import paged_attn

PROMPT = "It was a truth universally acknowledged, that "


def main() -> dict[str, str]:
    model = AutoModelForCausalLM.from_pretrained(str(files("paged_attn.demo_model"))).float().eval()
    prompt = torch.tensor([list(PROMPT.encode())])
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    texts = {}
    for mode, options in {"greedy": {}, "4 beams": {"num_beams": 4}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}.items():
        cache = paged_attn.PagedCache(model)
        tokens = model.generate(prompt, past_key_values=cache, **asked, **options)
        own = model.generate(prompt, past_key_values=DynamicCache(config=model.config), **asked, **options)
        assert tokens.equal(own), mode
        texts[mode] = bytes(tokens[0].tolist()).decode(errors="replace")
        copied = cache.table.rows * -(-cache.get_seq_length() // cache.page_size)
        print(f"{mode}: {cache.num_pages_held} pages, {copied} without sharing: {texts[mode]!r}")

    with paged_attn.patch(model) as patched:  # the same, but decode steps attend to the pages where they lie
        prefix = paged_attn.PagedCache(patched)
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=prefix)
        for ending in ("she ", "he "):
            branch = copy.deepcopy(prefix)  # holds the same pages, until it writes
            ids = torch.cat([prompt, torch.tensor([list(ending.encode())])], 1)
            tokens = model.generate(ids, past_key_values=branch, **{**asked, "attention_mask": torch.ones_like(ids)})
            texts[ending] = bytes(tokens[0].tolist()).decode(errors="replace")
            print(f"{branch.steps_in_place} steps in place, {branch.num_pages_used} pages in the pool: {texts[ending]!r}")
    return texts


if __name__ == "__main__":
    main()
