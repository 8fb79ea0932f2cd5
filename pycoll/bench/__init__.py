"""The benchmark behind ``pycoll bench``: sweep, check, report."""
