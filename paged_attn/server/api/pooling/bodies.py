"""Bodies of the routes of embeddings, scores and reranking."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paged_attn.server.api.bodies import PROMPTS
from paged_attn.server.api.bounds import Closed, Name, Salt, within
from paged_attn.server.http.errors import ApiError
from paged_attn.shown import shown

_TEXTS: list[Any] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]


class PoolingBody(Closed):
    """What these routes share. `null` is the default."""

    ignored = frozenset({"user"})

    model: Name | None = Field(None, description="the served model's name, or none")
    priority: int | None = Field(None, description="extension, where the server allows it: a lower one is more urgent; default 0")
    cache_salt: Salt | None = Field(None, description="extension: prefixes are shared only with requests of the same salt")
    timeout_seconds: float | None = Field(
        None, description="extension: the request ends with 504 after so long; at most the server's own", json_schema_extra=within(0.001)
    )


class EmbeddingBody(PoolingBody):
    """The body of POST /v1/embeddings."""

    input: Any = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists", json_schema_extra={"anyOf": PROMPTS}
    )
    encoding_format: Literal["float", "base64"] | None = Field(None, description="default float; base64 is of float32, little end first")
    dimensions: int | None = Field(None, description="only the first so many numbers, normalized anew", json_schema_extra=within(1))
    pooling: Literal["last", "mean", "cls"] | None = Field(None, description="extension: default: as the checkpoint says")
    normalize: bool | None = Field(None, description="extension: default: as the checkpoint says, else true")


class ScoreBody(PoolingBody):
    """The body of POST /v1/score, as vLLM has it."""

    text_1: Any = Field(description="a text, or a list of texts", json_schema_extra={"anyOf": _TEXTS})
    text_2: Any = Field(description="a text or a list of texts: one with each of many, or as many", json_schema_extra={"anyOf": _TEXTS})


class RerankBody(PoolingBody):
    """The body of POST /v1/rerank, as Jina and Cohere have it."""

    query: str
    documents: Any = Field(description='texts, or {"text": ...}', json_schema_extra={"type": "array", "minItems": 1})
    top_n: int | None = Field(None, description="only the best so many; default: all", json_schema_extra=within(1))
    return_documents: bool | None = Field(None, description="the documents' texts in the answer; default true")

    @property
    def texts(self) -> list[str]:
        """The documents.

        Raises:
            ApiError: 400 for anything else.
        """
        given = self.documents if isinstance(self.documents, list) else []
        texts = [each.get("text") if isinstance(each, dict) and len(each) == 1 else each for each in given]
        found = [text for text in texts if isinstance(text, str)]
        if not texts or len(found) < len(texts):
            allowed = 'a list of texts, or of {"text": ...}'
            raise ApiError(400, f"documents: got {shown(self.documents)}; allowed: {allowed}", param="documents")
        return found

    @property
    def count(self) -> int | None:
        """Of the best documents; None: all.

        Raises:
            ApiError: 400 for less than one.
        """
        if self.top_n is not None and self.top_n < 1:
            raise ApiError(400, f"top_n: got {shown(self.top_n)}; allowed: 1 or more", param="top_n")
        return self.top_n
