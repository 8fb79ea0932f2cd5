"""Ranks in the tasks of real barrier stages of Spark."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from engine_programs import Program, environment, needs

needs("pyspark")
if shutil.which("java") is None:
    pytest.skip("no java (apt: default-jre-headless)", allow_module_level=True)

SCRIPT = """
from pyspark.sql import SparkSession
import engine_ranks
from pycoll.integrations import spark

builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
context = builder.config("spark.driver.host", "127.0.0.1").getOrCreate().sparkContext
print(spark.run(context, engine_ranks.add, 2.0, size=3))
print(len(spark.run(context, engine_ranks.add, 2.0)))
# Spark shows the task that it saw fail first, which may be the one that lost its peer.
said = engine_ranks.caught(lambda: spark.run(context, engine_ranks.fail, 1, size=2, timeout_s=20))
print("rank 1 has no answer" in said or "rank 1 (" in said)
print(engine_ranks.caught(lambda: spark.run(context, engine_ranks.add, 2.0, size=0)))
print(engine_ranks.caught(lambda: spark.run(context, engine_ranks.add, 2.0, size=5)))
plain = context.parallelize(range(2), 2)
print("is no task of a barrier stage" in engine_ranks.caught(
    lambda: plain.mapPartitions(lambda rows: [spark.init().rank]).collect()))
barrier = plain.barrier().mapPartitions(lambda rows: [spark.init().size])
print(barrier.collect())
"""


def test_tasks_of_a_stage_are_ranks(program: Program, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert program(sys.executable, "script.py").splitlines() == [
        "[(0, 3, [6.0, 6.0, 6.0]), (1, 3, [6.0, 6.0, 6.0]), (2, 3, [6.0, 6.0, 6.0])]",
        "4",
        "True",
        "InvalidArgumentError: size is 0: expected a whole number of at least 1",
        "InvalidArgumentError: size is 5 and the master local[4] has 4 slots: all ranks run at "
        "once, so pass at most 4 or give the master more",
        "True",
        "[2, 2]",
    ]


#: Each worker of a local cluster is a process with an executor of its own.
CLUSTER = """
from pyspark.sql import SparkSession
import engine_ranks
from pycoll.integrations import spark

builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1")
builder = builder.config("spark.executorEnv.PYTHONPATH", PATHS)
builder = builder.config("spark.executor.memory", "512m")
context = builder.getOrCreate().sparkContext
print(spark.run(context, engine_ranks.add, 2.0, size=2))
print(len(set(spark.run(context, engine_ranks.executor, size=2))))
said = engine_ranks.caught(lambda: spark.run(context, engine_ranks.fail, 1, size=2, timeout_s=20))
print("rank 1 has no answer" in said or "rank 1 (" in said)
print(spark.run(context, engine_ranks.place, size=2))
"""


def test_executors_of_a_cluster_are_ranks(program: Program, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"PATHS = {environment()['PYTHONPATH']!r}\n{CLUSTER}")
    assert program(sys.executable, "script.py").splitlines() == [
        "[(0, 2, [4.0, 4.0, 4.0]), (1, 2, [4.0, 4.0, 4.0])]",
        "2",
        "True",
        "[(0, 1, 1.0), (1, 1, 1.0)]",
    ]
