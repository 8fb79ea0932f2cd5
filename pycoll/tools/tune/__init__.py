"""``pycoll tune``: measures links, and fits the cost model to the measured times."""
