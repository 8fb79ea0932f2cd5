"""Arrays and streams of the frameworks at hand on a real GPU; run by test_gpu.py.

Ranks are threads on device 0. Has never run: no GPU was there when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld, fresh_world

import pycoll

SIZE = 2


@pytest.fixture
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


def test_cupy(world: ThreadWorld) -> None:
    cupy = pytest.importorskip("cupy")

    def run(comm: pycoll.Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.arange(1000, dtype=cupy.float32).reshape(20, 50) + comm.rank
            made = comm.all_reduce(x)
            assert isinstance(made, cupy.ndarray)
            np.testing.assert_array_equal(made.get(), 2 * np.arange(1000).reshape(20, 50) + 1)
            columns = comm.all_reduce(x[:, ::2])  # packed
            np.testing.assert_array_equal(columns.get(), made.get()[:, ::2])
            work = comm.all_reduce(x, out=x, async_op=True)
            np.testing.assert_array_equal(work.wait().get(), made.get())
            assert stream.done

    world.run(run)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "complex64"])
def test_torch(world: ThreadWorld, dtype: str) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")

    def run(comm: pycoll.Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.arange(64, device="cuda").to(getattr(torch, dtype)).reshape(8, 8)
            made = comm.all_reduce(x)
            assert made.is_cuda
            assert torch.equal(made, x + x)
            assert torch.equal(comm.all_reduce(x.t()), (x + x).t())
            gathered = comm.all_gather(x[: comm.rank + 1])
            assert torch.equal(gathered, torch.cat([x[:1], x[:2]]))

    world.run(run)


def test_torch_graphs(world: ThreadWorld) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")

    def run(comm: pycoll.Communicator) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.ones(100, device="cuda")
            comm.all_reduce(x.clone())
            stream.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            comm.all_reduce(x, out=x)
            graph.capture_end()
            for _ in range(3):
                graph.replay()
            assert torch.equal(x.cpu(), torch.full((100,), 8.0))

    world.run(run)


def test_numba(world: ThreadWorld) -> None:
    pytest.importorskip("numba")
    from numba import cuda

    if not cuda.is_available():
        pytest.skip("Numba has no CUDA")

    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.stream()
        x = cuda.to_device(np.arange(50.0) + comm.rank, stream=stream)
        made = comm.all_reduce(x, stream=stream)
        np.testing.assert_array_equal(made.copy_to_host(stream=stream), 2 * np.arange(50.0) + 1)

    world.run(run)


def test_jax() -> None:
    """Alone in its world: threads of one process share JAX's stream."""
    jax: Any = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    world = fresh_world(1)
    x = jax.numpy.arange(50.0)
    for op in ("sum", "avg"):
        made = world.communicators[0].all_reduce(x * 2, op)
        assert isinstance(made, jax.Array)
        np.testing.assert_array_equal(np.asarray(made + 1), 2 * np.arange(50.0) + 1)
    world.close()
