"""One rank of a sweep, started by its path.

Not with ``-m``: that would look for pycoll in the current folder first, and find the sources there
instead of the installed package when the folder is a checkout.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, for the same reason
    from pycoll.bench.sweep import main

    sys.exit(main(sys.argv[1:]))
