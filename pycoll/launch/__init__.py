"""``pycoll run``: the launcher, the output of its ranks, and elastic jobs."""
