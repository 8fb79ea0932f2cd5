"""Parameter servers: ranks that combine the values of the workers and run no program of the user.

    pycoll run -n 4 --servers 2 train.py        workers are ranks 0-3, servers ranks 4 and 5

    import pycoll                               # train.py
    pycoll.init()
    mean = pycoll.all_reduce(gradient, "avg", algorithm="ps")

Under any other launcher the last ranks run a script that calls ``pycoll.ps.serve()``, or
``python -m pycoll.ps``. ``pycoll.size()`` counts workers, ``pycoll.servers()`` names the servers.
"""

from __future__ import annotations

from pycoll.ps.serving import serve

__all__ = ["serve"]
