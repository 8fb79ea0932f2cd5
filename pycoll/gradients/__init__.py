"""Reduction of gradients while the backward pass runs. ``pycoll.optim`` is the public name."""
