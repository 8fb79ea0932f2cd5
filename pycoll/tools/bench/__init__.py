"""The benchmark behind ``pycoll bench``: measures, checks and reports a range of message sizes."""
