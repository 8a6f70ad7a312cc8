"""Ready-made rewards."""
