"""Faults by chance: small real runs with a reward, an environment, a server, a config or a dataset
that is not as it should be. `python -m tests.fuzz.run` draws them from a seed and judges each.
"""
