"""``python -m pycoll`` is the same as ``pycoll``."""

from pycoll.cli import main

if __name__ == "__main__":
    main()
