"""What to say of a field that a body does not have: the one of ours that means it, or the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Set

from paged_attn.engine.setting_names import OTHER_PARAM, SAME_PARAM

SAME_FIELD = {**SAME_PARAM, "max_new_tokens": "max_tokens", "prompts": "prompt"}
OTHER_FIELD = {**OTHER_PARAM, "structured_outputs": "use json_schema, regex or grammar", "guided_choice": "use regex, as in 'yes|no'"}
LONGEST = 64  # characters: names that are compared


def field_instead(name: str, known: Set[str]) -> str:
    """ "" if nothing comes near."""
    if len(name) > LONGEST:
        return ""
    if (same := SAME_FIELD.get(name)) in known:
        return f"use {same}"
    if name in OTHER_FIELD:
        return OTHER_FIELD[name]
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
