"""Estimates of a run's memory before anything is loaded."""
