"""Checkpoints of stores: how the first worker takes and restores one, and its files."""
