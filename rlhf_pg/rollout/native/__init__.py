"""The native engine: the policy itself samples, every prompt computed once for its whole group."""
