"""One request on its way through the engine, the row of it that every step reads, and its text."""
