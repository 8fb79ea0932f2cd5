"""How a communicator changes its ranks: the survivors agree to shrink, and new ranks are let in."""
