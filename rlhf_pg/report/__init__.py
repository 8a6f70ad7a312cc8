"""Reporting of runs: metrics, files, trackers, pages."""
