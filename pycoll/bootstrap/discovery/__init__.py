"""Discovers facts of this process and machine before the process connects to other ranks."""
