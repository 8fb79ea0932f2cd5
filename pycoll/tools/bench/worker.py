"""One rank of a benchmark, started by the path of this file.

With ``-m`` Python would look for pycoll in the current folder first. If that is a checkout, it
would find the sources instead of the installed package.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, for the same reason
    from pycoll.tools.bench.measuring import main

    sys.exit(main(sys.argv[1:]))
