"""Checkpoints of stores: how workers take and restore one, and its files."""
