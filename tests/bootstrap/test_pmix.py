"""PMIx: the structures, clients that answer wrongly, and the real server of Open MPI's prterun.

``tests/launchers`` has the same between hosts, and Slurm.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import expect_joined, join_script, program

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous import pmix, pmix_client
from pycoll.bootstrap.rendezvous.pmi import BLOB_MAX
from pycoll.bootstrap.rendezvous.pmix import PmixExchange, open_pmix

Start = Callable[[str], None]

#: Sizes, offsets and numbers of PMIx 4.2, 5.0 and 6.1.
LAYOUT = {
    "sizeof(pmix_proc_t)": (ctypes.sizeof(pmix_client.Proc), 260),
    "offsetof(pmix_proc_t, rank)": (pmix_client.Proc.rank.offset, 256),
    "sizeof(pmix_byte_object_t)": (ctypes.sizeof(pmix_client.ByteObject), 16),
    "offsetof(pmix_byte_object_t, size)": (pmix_client.ByteObject.size.offset, 8),
    "sizeof(pmix_value_t)": (ctypes.sizeof(pmix_client.Value), 32),
    "offsetof(pmix_value_t, data)": (pmix_client.Value.data.offset, 8),
    "PMIX_UINT32": (pmix_client._UINT32, 14),
    "PMIX_BYTE_OBJECT": (pmix_client._BYTE_OBJECT, 27),
    "PMIX_ERR_NOT_FOUND": (pmix_client._NOT_FOUND, -46),
    "PMIX_ERR_TIMEOUT": (pmix_client._TIMEOUT, -24),
    "PMIX_GLOBAL": (pmix_client._GLOBAL, 3),
    "PMIX_RANK_WILDCARD": (pmix_client._WILDCARD, 0xFFFFFFFE),
    "sizeof(pmix_scope_t)": (1, 1),
    "sizeof(pmix_status_t)": (4, 4),
}
#: Debian's libpmix-dev.
HEADERS = Path(f"/usr/lib/{platform.machine()}-linux-gnu/pmix2/include")


def test_structures_have_the_known_layout() -> None:
    assert {name: ours for name, (ours, _) in LAYOUT.items()} == {
        name: known for name, (_, known) in LAYOUT.items()
    }


def test_structures_are_those_of_the_installed_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or not HEADERS.exists():
        pytest.skip(f"no C compiler, or no {HEADERS} (apt: gcc, libpmix-dev)")
    checks = [
        f"_Static_assert({name} == {known}, {name!r});" for name, (_, known) in LAYOUT.items()
    ]
    keys = '_Static_assert(sizeof(PMIX_JOB_SIZE) == sizeof("pmix.job.size"), "key");'
    source = tmp_path / "layout.c"
    text = "\n".join(["#include <stddef.h>", "#include <pmix.h>", *checks, keys, ""])
    source.write_text(text.replace("'", '"'))
    line = [compiler, f"-I{HEADERS}", "-c", str(source), "-o", "/dev/null"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def stand_in(version: bytes) -> type:
    class Library:
        def __init__(self, path: str) -> None:
            self.path = path

        def __getattr__(self, name: str) -> Any:
            assert name == "PMIx_Get_version"
            return type("Function", (), {"__call__": lambda self: version})()

    return Library


@pytest.mark.parametrize(
    "version",
    [
        b"OpenPMIx 5.0.11rc1 (PMIx Standard: 5.1, Stable ABI: 5.0, Provisional ABI: 5.0)",
        b"OpenPMIx 4.2.2, repo rev: gitc7b8fd9",
        b"OpenPMIx 6.1.0",
    ],
)
def test_known_versions_are_used(version: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", stand_in(version))
    monkeypatch.setattr(pmix_client, "candidates", lambda: iter(["first", "second"]))
    assert pmix_client.load().path == "first"  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [b"OpenPMIx 3.2.5", b"OpenPMIx 15.0", b"garbage", b"", None])
def test_unknown_versions_are_refused(
    version: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", stand_in(version or b""))
    with pytest.raises(pmix_client.ClientError, match="expected PMIx 4, 5, 6"):
        pmix_client.load()


def client_that(code: str) -> list[str]:
    """A command that stands for the client; ``tell`` writes a frame."""
    head = (
        f"import os, sys, time; sys.path.insert(0, {str(Path(pmix_client.__file__).parent)!r})\n"
        "import pmix_client as c\n"
        "def tell(data): os.write(1, len(data).to_bytes(4, 'little') + data)\n"
    )
    return [sys.executable, "-c", head + code]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Start:
    def replace(code: str) -> None:
        started = lambda prefix: subprocess.Popen(  # noqa: E731
            client_that(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        monkeypatch.setattr(pmix, "_start", started)

    return replace


HELLO = "tell(b'+0 2')\n"


def test_a_client_that_answers_well(client: Start) -> None:
    client(HELLO + "tell(b'+' + c.read_frame(sys.stdin.buffer))\ntell(b'+')\n")
    exchange = open_pmix(Deadline(20), 0, 2)
    assert exchange.blob_of_first(b"mine" * 1000) == b"mine" * 1000
    assert exchange.blob_of_first(b"") == b""
    exchange.close()
    assert exchange._client.returncode == 0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("", "the client ended early"),
        ("tell(b'+nothing')", "the client tells no rank and size"),
        ("tell(b'-libpmix.so.2 cannot be loaded')", "reports: libpmix.so.2 cannot be loaded"),
        ("tell(b'')", "answers with 0 bytes"),
        ("os.write(1, b'\\xff' * 8)", "answers with 4294967295 bytes, expected 1 to 2000"),
        ("os.write(1, b'\\5\\0\\0\\0+0')", "the client ended early"),
        (HELLO + "tell(b'-PMIx_Put failed')", "reports: PMIx_Put failed"),
        (HELLO, "the client ended early"),
    ],
)
def test_clients_that_answer_wrongly_are_told(code: str, text: str, client: Start) -> None:
    client(code)
    deadline = Deadline(20)
    with pytest.raises(errors.TransportError) as caught:
        PmixExchange(deadline).blob_of_first(b"x")
    assert text in str(caught.value)
    assert "PYCOLL_ADDRESS and PYCOLL_SECRET" in str(caught.value)
    assert deadline.remaining() > 5


def test_a_client_that_has_ended_is_asked_for_its_reason(client: Start) -> None:
    client(HELLO + "tell(b'-PMIx_Put failed')")
    exchange = PmixExchange(Deadline(20))
    # From now on nobody reads what is written to the client.
    exchange._client.wait()
    with pytest.raises(errors.TransportError, match="reports: PMIx_Put failed"):
        exchange.blob_of_first(b"x")


@pytest.mark.parametrize("code", ["time.sleep(60)", HELLO + "time.sleep(60)"])
def test_a_silent_client_ends_at_the_deadline(code: str, client: Start) -> None:
    client(code)
    began = time.monotonic()
    with pytest.raises(errors.TimeoutError, match="init waited 1 s while the PMIx client"):
        PmixExchange(Deadline(1)).blob_of_first(b"x")
    assert time.monotonic() - began < 10


def test_another_place_than_that_of_the_variables_is_told(client: Start) -> None:
    client(HELLO + "time.sleep(60)")
    with pytest.raises(errors.InvalidArgumentError) as caught:
        open_pmix(Deadline(20), 1, 2)
    assert "rank 1 of 2, and its PMIx server makes it rank 0 of 2" in str(caught.value)


def test_a_blob_has_a_bound(client: Start) -> None:
    client(HELLO + "time.sleep(60)")
    exchange = PmixExchange(Deadline(20))
    with pytest.raises(errors.InvalidArgumentError, match=f"publishes {BLOB_MAX + 1} bytes"):
        exchange.blob_of_first(bytes(BLOB_MAX + 1))
    exchange.abandon()


def test_without_a_library_the_error_says_what_to_set() -> None:
    code = "c._LIBRARY = 'libnone.so.2'\nc.main('prefix')"
    environ = {name: text for name, text in os.environ.items() if name != "PMIX_PREFIX"}
    done = subprocess.run(
        client_that(code), capture_output=True, timeout=60, check=True, env=environ
    )
    assert done.stdout[4:].startswith(b"-libnone.so.2 cannot be loaded (libnone.so.2: ")
    assert done.stdout.endswith(b"set LD_LIBRARY_PATH to its folder")


# The real server. The launcher's personality decides whether the ranks get variables of Open MPI.


def prterun(count: int, personality: str, *line: str) -> list[str]:
    command = [program("prterun"), "--personality", personality, "--map-by", ":OVERSUBSCRIBE"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return [*command, "-n", str(count), "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", *line]


@pytest.mark.parametrize(("personality", "source"), [("ompi", "Open MPI"), ("prte", "PMIx")])
def test_ranks_join_over_prterun_s_exchange(personality: str, source: str, tmp_path: Path) -> None:
    script = join_script(tmp_path, "os.environ['PYCOLL_INIT_TIMEOUT_S'] = '30'")
    expect_joined(prterun(3, personality, sys.executable, script), 3, source)


def test_one_rank_of_prterun_is_alone(tmp_path: Path) -> None:
    code = "import pycoll; c = pycoll.init(); print(c.rank, c.size)"
    command = prterun(1, "prte", sys.executable, "-c", code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 1\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (0, "init waited 2 s while the PMIx client waits for rank 0 to call pycoll.init()"),
        (1, "init waited 2 s for rank 1"),
    ],
)
def test_a_missing_rank_is_named(missing: int, text: str, tmp_path: Path) -> None:
    late = f"[ $PMIX_RANK = {missing} ] && sleep 6 || exec {sys.executable} {join_script(tmp_path)}"
    command = prterun(2, "ompi", "env", "PYCOLL_INIT_TIMEOUT_S=2", "sh", "-c", late)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert text in done.stderr


@pytest.mark.parametrize("order", ["jm", "mj", "jmjm", "mfj"])
def test_mpi_and_pycoll_live_in_one_process_under_prterun(order: str, tmp_path: Path) -> None:
    from test_pmi import WITH_MPI

    prefix = Path(sys.executable).parent.parent
    library = prefix / "lib"
    if not (library / "libmpi.so.40").exists():
        pytest.skip(f"no libmpi.so.40 in {library}: pip install -r tests/requirements.txt")
    here = Path(__file__).parents[1] / "support"
    script = tmp_path / "both.py"
    script.write_text(WITH_MPI.format(here=str(here), root=str(here.parent.parent), order=order))
    paths = f"LD_LIBRARY_PATH={library}:{library}/openmpi"
    with_mpi = ("env", paths, f"OPAL_PREFIX={prefix}", "MPI4PY_MPIABI=openmpi")
    expect_joined(prterun(2, "ompi", *with_mpi, sys.executable, str(script)), 2, "Open MPI")
