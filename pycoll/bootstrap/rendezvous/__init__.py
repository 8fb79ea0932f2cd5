"""The exchanges over which ranks join: stores, their frames, and the checks of every message."""
