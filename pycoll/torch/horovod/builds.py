"""Horovod's questions about the build. pycoll contains none of Horovod's libraries."""

from __future__ import annotations

from pycoll import _core


def mpi_threads_supported() -> bool:
    """Return False: pycoll does not use MPI.

    Errors and cost: none.

    >>> hvd.mpi_threads_supported()
    False
    """
    return False


def mpi_enabled() -> bool:
    """Return False: pycoll does not use MPI.

    Errors and cost: none.

    >>> hvd.mpi_enabled()
    False
    """
    return False


def mpi_built() -> bool:
    """Return False: pycoll does not use MPI.

    Errors and cost: none.

    >>> hvd.mpi_built()
    False
    """
    return False


def gloo_enabled() -> bool:
    """Return False: pycoll moves the data itself.

    Errors and cost: none.

    >>> hvd.gloo_enabled()
    False
    """
    return False


def gloo_built() -> bool:
    """Return False: pycoll moves the data itself.

    Errors and cost: none.

    >>> hvd.gloo_built()
    False
    """
    return False


def nccl_built() -> int:
    """Return 0; Horovod returns the version of NCCL here.

    Errors and cost: none.

    >>> hvd.nccl_built()
    0
    """
    return 0


def ddl_built() -> bool:
    """Return False: pycoll does not use DDL.

    Errors and cost: none.

    >>> hvd.ddl_built()
    False
    """
    return False


def ccl_built() -> bool:
    """Return False: pycoll does not use oneCCL.

    Errors and cost: none.

    >>> hvd.ccl_built()
    False
    """
    return False


def cuda_built() -> bool:
    """Return whether this build can reduce tensors on CUDA devices.

    Errors: none. Cost: a look at the driver in the first call.

    >>> hvd.cuda_built() in (True, False)
    True
    """
    return "not part of this build" not in _core.device_summary()


def rocm_built() -> bool:
    """Return False: pycoll has no support for ROCm devices.

    Errors and cost: none.

    >>> hvd.rocm_built()
    False
    """
    return False
