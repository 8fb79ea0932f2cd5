"""Communicators that change their ranks: survivors agree to shrink, and new ranks join."""
