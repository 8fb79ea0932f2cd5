"""Spark: the tasks of a barrier stage are ranks.

    from pycoll.integrations import spark

    def train(step_size):
        comm = pycoll.world()
        ...

    losses = spark.run(session.sparkContext, train, 0.1, size=4)

The barrier's own ``allGather`` is the exchange by which the ranks meet, so no address is needed.
"""

from __future__ import annotations

import base64
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pycoll
from pycoll.errors import InvalidArgumentError
from pycoll.integrations import check_size


def init(**words: Any) -> pycoll.Communicator:
    """Join the world of the tasks of this barrier stage; every task calls this once.

    ``words``: arguments of ``pycoll.init`` other than rank, size, address, comm and all_gather.

    Returns the communicator; a task's rank is its partition. Call ``pycoll.finalize()`` before the
    task ends: Spark uses the process for further tasks.

    Raises InvalidArgumentError outside of a barrier stage, and the errors of ``pycoll.init``.

    Cost: at most five rounds of ``BarrierTaskContext.allGather``, and the connections of the ranks.

    >>> def task(rows):
    ...     comm = adapter.init()
    ...     yield comm.size
    ...     pycoll.finalize()
    >>> stage = pyspark.SparkContext.getOrCreate().parallelize(range(2), 2).barrier()
    >>> stage.mapPartitions(task).collect()
    [2, 2]
    """
    pyspark = importlib.import_module("pyspark")
    try:
        context = pyspark.BarrierTaskContext.get()
        size = len(context.getTaskInfos())
    except Exception as error:  # pyspark's own, or that of its driver where there is no task
        raise InvalidArgumentError(
            f"this is no task of a barrier stage ({error}): use rdd.barrier().mapPartitions(f) "
            "and call pycoll.integrations.spark.init() in f, or use pycoll.integrations.spark.run()"
        ) from None

    def all_gather(blob: bytes) -> list[bytes]:
        texts = context.allGather(base64.b64encode(blob).decode())
        return [base64.b64decode(text) for text in texts]

    return pycoll.init(
        rank=context.partitionId(),
        size=size,
        all_gather=all_gather,
        **words,
    )


def _local_slots(spark_context: Any) -> int | None:
    """Count the tasks that run at once in this process; None where executors may still come."""
    if not re.match(r"local(\[|$)", str(spark_context.master)):
        return None
    if spark_context.getConf().contains("spark.default.parallelism"):
        return None
    return int(spark_context.defaultParallelism)


def run(
    spark_context: Any,
    function: Callable[..., Any],
    *args: Any,
    size: int | None = None,
    **words: Any,
) -> list[Any]:
    """Call ``function(*args)`` in ``size`` tasks of one barrier stage, each a rank of one world.

    ``function``: what a rank runs, with the arguments ``args``. ``spark_context``: a SparkContext.
    ``size``: the number of ranks; None means the context's ``defaultParallelism``. Spark needs as
    many free slots at once. ``words``: as for ``init``.

    Returns the results in rank order. An exception of a task fails the stage, as Spark reports it.

    Raises InvalidArgumentError for a size below 1 or above the slots of a local master, and Spark's
    error if a task fails. Executors of a cluster may still come, so there Spark itself looks for
    slots, 40 times, one every 15 s (``spark.scheduler.barrier.maxConcurrentTasksCheck.*``).

    Cost: one Spark job and the cost of ``init``.

    >>> adapter.run(pyspark.SparkContext("local[2]"), lambda: pycoll.rank(), size=2)
    [0, 1]
    """
    ranks = check_size(spark_context.defaultParallelism if size is None else size)
    slots = _local_slots(spark_context)
    if slots is not None and ranks > slots:
        raise InvalidArgumentError(
            f"size is {ranks} and the master {spark_context.master} has {slots} slots: all ranks "
            f"run at once, so pass at most {slots} or give the master more"
        )

    def task(rows: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        comm = init(**words)
        try:
            yield comm.rank, function(*args)
        finally:
            pycoll.finalize()

    stage = spark_context.parallelize(range(ranks), ranks).barrier()
    return [result for _, result in sorted(stage.mapPartitions(task).collect())]
