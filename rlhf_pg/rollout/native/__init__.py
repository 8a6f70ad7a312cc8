"""The native engine, where the policy samples and computes each prompt once for its group."""
