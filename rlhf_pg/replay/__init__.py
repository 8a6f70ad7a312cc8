"""Runs looked at after they were made: a step made again, or otherwise, and two runs compared."""
