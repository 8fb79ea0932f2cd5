"""What Horovod's programs ask about the build: none of Horovod's media is in it."""

from __future__ import annotations

from pycoll import _core


def mpi_threads_supported() -> bool:
    """False: there is no MPI underneath."""
    return False


def mpi_enabled() -> bool:
    """False: there is no MPI underneath."""
    return False


def mpi_built() -> bool:
    """False: there is no MPI underneath."""
    return False


def gloo_enabled() -> bool:
    """False: pycoll moves the data itself."""
    return False


def gloo_built() -> bool:
    """False: pycoll moves the data itself."""
    return False


def nccl_built() -> int:
    """0, where Horovod would give NCCL's version."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether tensors on CUDA devices can be reduced there, if there are any."""
    return "not part of this build" not in _core.device_summary()


def rocm_built() -> bool:
    """False: tensors are in host memory."""
    return False
