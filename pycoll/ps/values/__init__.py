"""The values of a store besides plain arrays: tables of rows, and optimizers that step on servers.

Nothing here opens a connection. A server computes with these modules what its shards hold, and the
bits depend on the updates alone, so the replicas of a shard agree.
"""
