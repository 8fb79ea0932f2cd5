"""``pycoll doctor``: facts of hosts, probes between them, and what is wrong."""
