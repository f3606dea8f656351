"""/v1/embeddings, /v1/score and /v1/rerank: texts in, vectors or scores out, of models that embed or classify."""
