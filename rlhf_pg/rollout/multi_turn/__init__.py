"""Episodes: completions of several turns, answered by an environment or by tools."""
