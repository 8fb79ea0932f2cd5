"""What importing pycoll costs, and what it brings along."""

from __future__ import annotations

from pathlib import Path

from harness import python

#: Modules of ours behind ``pycoll.all_reduce``; joining, plans, proofs and tools come later.
OURS = """
    _core arrays arrays.device_view arrays.host_arrays arrays.p2p_message arrays.registry
    comm comm.codecs comm.communicator comm.dynamo comm.operations comm.point_to_point comm.work
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


#: Bytes of source that `import pycoll` and a first call compile where no byte code is kept. That is
#: most of the time of an import, which `bench/overhead.py` measures.
SOURCE_BYTES = 200_000


def test_import_compiles_little() -> None:
    code = """
import sys, numpy
import pycoll
pycoll.all_reduce
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "pycoll"]
print(*(module.__file__ for module in ours if module.__file__.endswith(".py")), sep="\\n")
"""
    sizes = {line: Path(line).stat().st_size for line in python(code).splitlines()}
    assert len(sizes) >= 20
    assert sum(sizes.values()) <= SOURCE_BYTES, sizes


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
