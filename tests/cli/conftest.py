"""The trainer on a tiny model, to compare commands with."""

from tests.trainers.conftest import make as make
