"""What importing pycoll costs, and what it brings along."""

from __future__ import annotations

from harness import python

#: Modules of ours behind ``pycoll.all_reduce``; joining, plans, proofs and tools come later.
OURS = """
    _core arrays arrays.device_view arrays.host_arrays arrays.p2p_message arrays.registry
    arrays.rows comm comm.coded_ends comm.codecs comm.communicator comm.cpu_balancing
    comm.data_movement comm.dynamo
    comm.objects comm.operations comm.pickled comm.point_to_point comm.reductions comm.work
    comm.world errors
    foreign_words ops schedule schedule.collectives types
"""
#: Slow modules of the standard library, and packages, that nobody needs before joining a world.
LATER = """
    argparse array asyncio concurrent.futures ctypes dataclasses difflib email fractions hashlib
    hmac http importlib.metadata inspect ipaddress json logging mmap multiprocessing pathlib
    random secrets selectors shutil signal socket ssl statistics struct subprocess tempfile
    unittest urllib uuid click jax ml_dtypes mpi4py rich torch
"""
#: Never imported by us, except where the user's own objects or the command line bring them.
NEVER = "asyncio click cupy jax matplotlib ml_dtypes mpi4py multiprocessing rich torch"


def test_import_is_fast() -> None:
    """60 ms of processor time beyond NumPy's, our sources compiled anew as in the very first one.

    On machines so slow that NumPy's own import takes over 180 ms, a third of that. Both are
    measured in the same process, since load comes and goes; one process in time is enough.
    """
    code = """
import sys, time
begin = time.thread_time()  # NumPy's threads spin for a while after its import
import numpy
middle = time.thread_time()
import importlib.util, threading, zlib  # only our own byte code is not looked at
sys.dont_write_bytecode, sys.pycache_prefix = True, "/nowhere"
import pycoll
pycoll.all_reduce
print(middle - begin, time.thread_time() - middle)
"""
    runs = []
    for _ in range(10):
        numpys, ours = map(float, python(code).split())
        runs.append((ours, numpys))
        if ours < max(0.060, numpys / 3):
            return
    raise AssertionError(f"(seconds, NumPy's seconds) of every process: {runs}")


def test_only_what_calls_need_is_imported() -> None:
    code = """
import sys, numpy
before = set(sys.modules)
import pycoll
pycoll.all_reduce
print(*(set(sys.modules) - before))
"""
    added = set(python(code).split())
    assert {name.partition(".")[2] for name in added if name.startswith("pycoll.")} == {
        *OURS.split()
    }
    assert added.isdisjoint(LATER.split())


def test_joining_and_calling_import_no_frameworks() -> None:
    code = """
import sys, numpy, pycoll
comm = pycoll.init(rank=0, size=1)
comm.all_reduce(numpy.ones(3)), comm.all_gather(3), comm.barrier()
print(*sys.modules)
"""
    assert set(python(code).split()).isdisjoint(NEVER.split())
