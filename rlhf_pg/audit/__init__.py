"""What a config's expected gradient is, and why it differs from the true one, by enumeration."""
