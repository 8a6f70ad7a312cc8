"""The tiny trainers of tests/trainers, and the contents of a directory."""

from tests.trainers.conftest import make

__all__ = ["make"]
