"""Episodes: completions of several turns that an environment or tools answer."""
