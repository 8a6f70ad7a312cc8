"""The native engine: the policy itself samples, and computes each prompt once for its group."""
