"""Tests of the `rlhf-pg` command."""
