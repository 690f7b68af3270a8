"""Checkpoints on disk: complete or absent, checked when read; no framework needed."""
