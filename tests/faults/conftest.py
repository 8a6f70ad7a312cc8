"""The trainers of `tests/trainers`."""

from tests.trainers.conftest import make as make
