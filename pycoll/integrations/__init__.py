"""Adapters for engines that start the processes of a program: Ray, Dask and Spark.

    ray      a backend of Ray's collective groups, a backend of Ray Train, actors and tasks
    dask     one rank on each worker of a Dask client
    spark    the tasks of a Spark barrier stage

An adapter imports its engine when the program calls it. The page docs/guides/ray-dask-spark.md
shows each one.
"""
