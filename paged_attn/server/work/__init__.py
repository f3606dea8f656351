"""From the event loop to the engine's one thread and back: calls, jobs, queues, texts."""
