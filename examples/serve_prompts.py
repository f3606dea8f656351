"""paged_attn.LLM: a ragged batch of prompts, each with its own parameters, served with continuous batching over paged KV."""

from importlib.resources import files

from paged_attn import LLM, Completion, SamplingParams


def main() -> list[Completion]:
    llm = LLM(files("paged_attn.demo_model"))
    prompts = ["It was", "Mr. Knightley had never before seen her", list(b"Her sister, who")]
    params = [SamplingParams(max_new_tokens=40, temperature=0.8, seed=seed) for seed in range(3)]
    completions = llm.generate(prompts, params)
    for completion in completions:
        print(f"{llm.tokenizer.decode(completion.prompt_token_ids)!r} -> {completion.text!r} ({completion.finish_reason})")
    return completions


if __name__ == "__main__":
    main()
