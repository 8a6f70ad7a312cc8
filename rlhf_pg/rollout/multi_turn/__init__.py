"""Episodes: multi-turn completions that an environment or tools answer."""
