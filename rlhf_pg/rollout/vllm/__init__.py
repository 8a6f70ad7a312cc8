"""vLLM as the engine: in this process, or on servers of its own."""
