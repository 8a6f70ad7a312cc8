"""Steps of finished runs: made again, compared, and searched."""
