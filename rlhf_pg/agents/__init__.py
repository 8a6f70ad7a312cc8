"""Agents: programs of their own that ask the policy over HTTP, as they would ask OpenAI."""
