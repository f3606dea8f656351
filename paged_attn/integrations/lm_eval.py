"""lm-evaluation-harness in one process with the engine: `python -m paged_attn.integrations.lm_eval --model paged_attn ...`.

Importing this module registers the model `paged_attn` with the harness (0.4.13 or later); it needs the extra `lm-eval`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from paged_attn.engine.llm import LLM
from paged_attn.engine.requests.outputs import Completion
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.shown import shown

SCORES_AT_A_TIME = 1 << 18  # tokens whose log-probabilities are in memory at once
Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # the harness's cache key, context, continuation


@register_model("paged_attn")
class PagedAttnLM(TemplateLM):  # type: ignore[misc]
    """The harness' model over an `LLM`: log-likelihoods are those of its `hf` model, and contexts that requests share are computed once.

    Args:
        pretrained: a directory or a Hub id.
        llm: an LLM that is there already, with its tokenizer, instead of `pretrained`; it stays open.
        tokenizer: a tokenizer, or the path of one; default: the one beside the model.
        dtype: "float32", "bfloat16", ...; default: the checkpoint's.
        device: as `LLM` takes it.
        max_length: tokens of the longest input; default: what model and pool have room for.
        max_gen_toks: new tokens of a task that does not say.
        add_bos_token: whether texts get special tokens; default: as the tokenizer does.
        prefix_token_id: what precedes a text without a context; default: the tokenizer's BOS or EOS.
        chat_template_args: variables for the chat template.
        batch_size, max_batch_size: what the harness gives every model; batches are continuous here, and these change nothing.
        settings: of the engine, such as page_size.

    Raises:
        ValueError: neither or both of `pretrained` and `llm`, no tokenizer, a dtype that torch does not have, or as `LLM` raises it.
    """

    def __init__(
        self,
        pretrained: str | Path | None = None,
        *,
        llm: LLM | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if (pretrained is None) == (llm is None):
            raise ValueError("give either pretrained=PATH_OR_HUB_ID or llm=an LLM")
        if isinstance(tokenizer, (str, Path)):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        if llm is None:
            assert pretrained is not None
            llm = LLM(pretrained, tokenizer=tokenizer, dtype=_dtype(dtype), device=device, **settings)
        elif settings:
            raise ValueError(f"{', '.join(settings)}: settings are for an engine that is made here; llm= has its own")
        self.llm, self.tokenizer = llm, tokenizer if tokenizer is not None else llm.tokenizer
        if self.tokenizer is None:
            raise ValueError("the harness sends texts, and there is no tokenizer; give tokenizer=")
        self.max_length = llm.engine.input_processor.room if max_length is None else int(max_length)
        self.max_gen_toks, self.add_bos_token, self._prefix = int(max_gen_toks), add_bos_token, prefix_token_id
        self.chat_template_args = dict(chat_template_args or {})

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id  # type: ignore[no-any-return]

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text without a context."""
        candidates = (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        if (found := next((token for token in candidates if token is not None), None)) is None:
            raise ValueError("the tokenizer has neither BOS nor EOS; give prefix_token_id= for texts without a context")
        return found

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )  # fmt: skip
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text; one that begins with BOS gets no second one, unless `add_special_tokens` is given."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            special = False
        ids: list[int] = self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each request's text, in windows that together predict each token once."""
        texts = [request.args[0] for request in requests]
        windows = [
            (number, (None, *make_disjoint_window(window)))
            for number, text in enumerate(texts)
            for window in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        ]
        totals = [0.0] * len(texts)
        scores = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm=disable_tqdm)
        for (number, _), (score, _) in zip(windows, scores, strict=True):
            totals[number] += score
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each request's context, cut before its first stop string."""
        prompts, params, stops = [], [], []
        for text, given in (request.args for request in requests):
            settings = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until, new = settings.pop("until", None) or [], settings.pop("max_gen_toks")
            settings.pop("do_sample", None)
            if (room := self.max_length - new) <= 0:
                raise ValueError(f"max_gen_toks is {new}; allowed are less than max_length, {self.max_length}: a context needs room, too")
            stops.append([stop for stop in ([until] if isinstance(until, str) else until) if stop])
            prompts.append(self.tok_encode(text)[-room:])
            params.append(SamplingParams(max_new_tokens=new, stop=tuple(stops[-1]), **settings))
        answers = []
        for request, stop, completion in zip(requests, stops, self._generate(prompts, params, disable_tqdm), strict=True):
            answers.append(postprocess_generated_text(completion.text, stop, None))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Scored], disable_tqdm: bool = False, **others: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is what greedy decoding gives; contexts that are too long lose their
        beginnings. Raises ValueError: a continuation of more than `max_length` tokens."""
        found: list[tuple[float, bool]] = []
        for group in _groups(requests):
            prompts, params = [], []
            for _, context, continuation in group:
                if len(continuation) > self.max_length:
                    limit = f"allowed are {self.max_length} at most (max_length)"
                    raise ValueError(f"a continuation has {len(continuation)} tokens; {limit}: score it as a rolling task, in windows")
                prompt = [*context, *continuation][-(self.max_length + 1) :]  # nothing follows from the last token
                prompts.append(prompt)
                start = max(len(prompt) - len(continuation), 1)
                params.append(SamplingParams(max_new_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start))
            for (key, _, _), completion in zip(group, self._generate(prompts, params, disable_tqdm), strict=True):
                found.append(_likelihood(completion))
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams], quiet: bool) -> list[Completion]:
        return self.llm.generate(prompts, params, progress=False if quiet else None) if prompts else []


def _likelihood(completion: Completion) -> tuple[float, bool]:
    tokens, rows = completion.prompt_token_ids, completion.prompt_logprobs
    assert rows is not None
    scored = [(token, row) for token, row in zip(tokens, rows, strict=True) if row is not None]
    return sum(row[token] for token, row in scored), all(token == max(row, key=row.__getitem__) for token, row in scored)


def _groups(requests: Sequence[Scored]) -> Iterator[list[Scored]]:
    """In order, as many at a time as have SCORES_AT_A_TIME tokens to score; one at least."""
    group: list[Scored] = []
    count = 0
    for request in requests:
        if group and count + len(request[2]) > SCORES_AT_A_TIME:
            yield group
            group, count = [], 0
        group.append(request)
        count += len(request[2])
    if group:
        yield group


def _dtype(name: str | torch.dtype) -> torch.dtype | None:
    if isinstance(name, torch.dtype):
        return name
    found = None if name == "auto" else getattr(torch, name, name)
    if found is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {shown(name)}; allowed are auto, float32, bfloat16, float16")
    return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
