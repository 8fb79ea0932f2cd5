"""``python -m pycoll`` runs the same command line as ``pycoll``."""

from pycoll.tools.cli import main

if __name__ == "__main__":
    main()
