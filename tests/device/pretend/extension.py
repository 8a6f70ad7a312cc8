"""The compiled part of the pretend device; importing this is what has to come before torch."""

from tests.device.pretend import library

library.preload("pretend_cuda")
ext = library.load("pretend_cuda")
