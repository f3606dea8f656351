"""OpenAI's routes: bodies in, answers out, whole or streamed."""
