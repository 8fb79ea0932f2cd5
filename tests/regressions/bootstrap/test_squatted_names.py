"""The ranks of a job met at one abstract unix socket whose name any user can work out: who bound it
first kept them from meeting at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from joining import SECRET, all_well, run_all

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous import store
from pycoll.bootstrap.rendezvous.store import join_unix

#: Another user than root's; a process can only become one if it is root's.
STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")

#: How a name is held: by a listener that takes nobody, by one with no place left, by a mere bind.
_SQUAT = """
import os, socket, sys
os.setuid(int(sys.argv.pop(1)))
held = []
for word in sys.argv[1:]:
    how, _, name = word.partition(":")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("\\0" + name)
    held.append(sock)
    if how != "bind":
        sock.listen(0 if how == "full" else 100)
    if how == "full":
        guest = socket.socket(socket.AF_UNIX)
        guest.connect("\\0" + name)
        held.append(guest)
print("holds", flush=True)
sys.stdin.read()
"""


def names_of(job: str, secret: bytes = b"") -> list[str]:
    """As a squatter works them out, who knows the source text but no secret."""
    key = hashlib.sha256(f"{os.geteuid()}\0{job}".encode()).digest()
    if secret:
        key = hmac.digest(secret, key, "sha256")
    return [store._name_of(key, number)[1:] for number in range(store._NAMES)]


@contextlib.contextmanager
def squatter(held: Sequence[str]) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", _SQUAT, str(STRANGER), *held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "holds\n"
            yield
        finally:
            process.kill()


def meet(job: str, secret: bytes = b"", seconds: float = 30.0) -> list[object]:
    """Three ranks, of which rank 0 comes last."""

    def one(rank: int) -> list[bytes]:
        time.sleep(0.2 if rank == 0 else 0.0)
        exchange = join_unix(job, rank, 3, Deadline(seconds), secret)
        try:
            found = exchange.all_gather(bytes([rank]))
        except BaseException:
            exchange.abandon()
            raise
        exchange.close()
        return found

    return run_all([functools.partial(one, rank) for rank in range(3)])


@needs_root
@pytest.mark.parametrize("how", ["listen", "full", "bind"])
def test_the_ranks_meet_at_the_next_name(how: str) -> None:
    job = f"squatted {how} {os.getpid()}"
    with squatter([f"{how}:{name}" for name in names_of(job)[:2]]):
        begin = time.monotonic()
        assert all_well(meet(job)) == [[b"\0", b"\1", b"\2"]] * 3
        assert time.monotonic() - begin < 20, "the promise is not to wait for the deadline"


@needs_root
@pytest.mark.parametrize("how", ["listen", "full"])
def test_where_all_names_are_held_all_ranks_say_so_at_once(how: str) -> None:
    job = f"all squatted {how} {os.getpid()}"
    with squatter([f"{how}:{name}" for name in names_of(job)]):
        begin = time.monotonic()
        results = meet(job)
        assert time.monotonic() - begin < 20, "the promise is not to wait for the deadline"
        for result in results:
            assert isinstance(result, errors.TransportError), result
            assert "set PYCOLL_SECRET on all ranks" in str(result)
        assert how == "full" or f"of user {STRANGER} listens there" in str(results[1])


@needs_root
def test_names_that_follow_from_a_secret_are_free() -> None:
    job = f"secret {os.getpid()}"
    with squatter([f"listen:{name}" for name in names_of(job)]):
        assert all_well(meet(job, SECRET.encode())) == [[b"\0", b"\1", b"\2"]] * 3
    assert not set(names_of(job)) & set(names_of(job, SECRET.encode()))


def test_ranks_with_other_secrets_do_not_meet() -> None:
    job = f"two secrets {os.getpid()}"
    jobs = [
        lambda: join_unix(job, 0, 2, Deadline(0.5), SECRET.encode()).all_gather(b""),
        lambda: join_unix(job, 1, 2, Deadline(0.5), SECRET[::-1].encode()).all_gather(b""),
    ]
    for result in run_all(jobs):
        assert isinstance(result, errors.TimeoutError), result
