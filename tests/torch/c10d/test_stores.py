"""Worlds that meet at a store of torch which outlives them, as torchrun's does."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_processes import run_ranks

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery import host
from pycoll.bootstrap.rendezvous import torch_store
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange

PATIENCE = datetime.timedelta(seconds=20)


def gather(store: dist.Store, rank: int, text: str) -> list[bytes]:
    joined = TorchStoreExchange(store, rank, 2, Deadline(10))
    try:
        found = joined.all_gather(f"{text}{rank}".encode())
    except BaseException:
        joined.abandon()
        raise
    return found


def both(store: dist.Store, text: str) -> list[list[bytes]]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: gather(store, rank, text), range(2)))


def test_a_world_reads_no_keys_of_an_earlier_one() -> None:
    store = dist.HashStore()
    for text in ("first", "second", "third"):
        assert both(store, text) == [[f"{text}0".encode(), f"{text}1".encode()]] * 2


def test_any_store_of_torch_will_do(tmp_path: Path) -> None:
    for store in (dist.FileStore(str(tmp_path / "file"), 2), dist.HashStore()):
        for text in ("first", "second"):
            found = both(dist.PrefixStore("any", store), text)
            assert found == [[f"{text}0".encode(), f"{text}1".encode()]] * 2


def test_a_world_that_failed_leaves_the_next_one_alone() -> None:
    store = dist.HashStore()
    TorchStoreExchange(store, 0, 2, Deadline(10)).abandon()
    with pytest.raises(errors.PycollError, match="rank 0 broke off while the ranks were joining"):
        gather(store, 1, "")
    assert both(store, "next") == [[b"next0", b"next1"]] * 2


def test_two_processes_with_one_rank_are_told_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one, which is alive, is another by what it says of itself only."""
    store = dist.HashStore()
    first = TorchStoreExchange(store, 0, 2, Deadline(10))
    with monkeypatch.context() as other:
        other.setattr(torch_store, "process_name", lambda: "here:7")
        with pytest.raises(errors.InvalidArgumentError) as caught:
            gather(store, 0, "")
    assert f"claim rank 0, {host.process_name()} and here:7" in str(caught.value)
    assert "if __name__ == '__main__'" in str(caught.value)
    with pytest.raises(errors.PycollError, match="two processes claim rank 0"):
        first.all_gather(b"")
    second = TorchStoreExchange(store, 1, 2, Deadline(10))
    with pytest.raises(errors.PycollError, match="two processes claim rank 0"):
        second.all_gather(b"")
    assert both(store, "next") == [[b"next0", b"next1"]] * 2


def test_who_has_ended_may_be_succeeded() -> None:
    code = (
        "from pycoll.bootstrap.discovery import host\n"
        "print(host.process_identity(), flush=True)\ninput()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        identity = process.stdout.readline().strip()
        assert host.still_runs(identity) and host.still_runs(host.process_identity())
        process.stdin.write("\n")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not host.still_runs(identity), "it runs no more, though its parent has not asked yet"
    assert not host.still_runs(identity)
    elsewhere = " ".join(["elsewhere", *identity.split(" ")[1:]])
    assert not host.still_runs(elsewhere)
    store = dist.HashStore()
    store.set("seat/0", json.dumps({"nonce": "1", "name": "gone", "process": identity}))
    TorchStoreExchange(store, 0, 2, Deadline(10))


def join(store: dist.Store, rank: int) -> None:
    dist.init_process_group("pycoll", store=store, rank=rank, world_size=2, timeout=PATIENCE)


def join_again_and_again(rank: int, size: int, port: int, folder: str) -> None:
    """The last process is one that claims the place of rank 1."""
    import pycoll.torch  # the import registers the backend

    assert pycoll.torch.__doc__
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    try:
        if rank == size - 1:
            store.get("two are there")
            with pytest.raises(ValueError, match="two processes claim rank 1"):
                join(store, 1)
            store.set("three are told", b"")
            return
        for world in range(6):
            if world == 2:
                os.environ["PYCOLL_TRANSPORTS"] = ("shm", "tcp")[rank]
                with pytest.raises(ValueError, match="no transport is left"):
                    join(store, rank)
                del os.environ["PYCOLL_TRANSPORTS"]
                continue
            join(store, rank)
            if world == 4:
                store.set("two are there", b"")
                store.get("three are told")
            found = torch.tensor([float(world + rank)])
            dist.all_reduce(found)
            assert found.item() == 2 * world + 1
            dist.destroy_process_group()
    except BaseException:
        Path(folder, str(rank)).write_text(traceback.format_exc())
        raise


def test_groups_are_made_again_at_one_store(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes = run_ranks(3, join_again_and_again, server.port, str(tmp_path))
    assert codes == [0] * 3, "\n".join(path.read_text() for path in tmp_path.iterdir())
