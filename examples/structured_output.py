"""Answers that follow a JSON schema or a regular expression, beside answers that do not: `pip install '.[structured]'`."""

import json
import re
from importlib.resources import files

from paged_attn import LLM, SamplingParams

PERSON = {
    "type": "object",
    "required": ["name", "age", "married"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "married": {"type": "boolean"},
    },
}
SENTENCE = r"(She|He) [a-z ,]{10,60}\."


def main() -> dict[str, object]:
    llm = LLM(files("paged_attn.demo_model"))
    params = [
        SamplingParams(json_schema=PERSON, max_new_tokens=400, temperature=0.7, seed=1),
        SamplingParams(regex=SENTENCE),
        SamplingParams(max_new_tokens=40),
    ]
    person, sentence, free = llm.generate(["Miss Bates in a few words: ", "And then? ", "And then? "], params)
    print(f"schema: {person.text!r}\nregex:  {sentence.text!r}\nfree:   {free.text!r}")
    assert person.finish_reason == sentence.finish_reason == "stop" and re.fullmatch(SENTENCE, sentence.text)
    found: dict[str, object] = json.loads(person.text)
    return found


if __name__ == "__main__":
    main()
