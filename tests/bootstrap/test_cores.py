"""What ranks tell each other of their cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycoll.bootstrap.discovery.identity import Identity, cores_shared_by, ranks_per_core
from pycoll.config import Config
from pycoll.cores import CpuQuota, core_numbers, core_text, cpu_quota

CORES = st.sets(st.integers(0, 300), min_size=1)


@given(CORES)
def test_cores_come_back(cores: set[int]) -> None:
    assert core_numbers(core_text(cores)) == cores


def test_cores_are_told_as_ranges() -> None:
    assert core_text({3, 0, 1, 2, 8, 10, 11}) == "0-3,8,10-11"


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "0-65536", "1,,2", "0-9999999999"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        core_numbers(text)


def world(*cores_of_ranks: str, hosts: str = "") -> list[Identity]:
    mine = Identity.mine(Config())
    return [
        mine._replace(cores=cores, host_id=hosts[rank : rank + 1])
        for rank, cores in enumerate(cores_of_ranks)
    ]


def test_ranks_that_are_bound_to_cores_of_their_own_do_not_share_them() -> None:
    bound = world("0", "1", "2", "3")
    assert ranks_per_core(bound) == 1
    assert cores_shared_by(bound, 2) == 4
    assert ranks_per_core(world("0-1", "0-1")) == 1
    assert ranks_per_core(world("0", "0", "0")) == 3
    assert ranks_per_core(world(*["0-1"] * 8)) == 4


def test_hosts_have_cores_of_their_own() -> None:
    ranks = world("0-3", "0", "0-3", "0", "0", hosts="abaab")
    assert ranks_per_core(ranks) == 2
    assert [cores_shared_by(ranks, rank) for rank in range(5)] == [4, 1, 4, 4, 1]


def test_an_identity_with_other_cores_is_refused() -> None:
    (mine,) = world("0-1")
    assert Identity.from_bytes(mine.to_bytes()) == mine
    with pytest.raises(ValueError):
        Identity.from_bytes(mine._replace(cores="all").to_bytes())


def groups(tmp_path: Path, line: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Folders as /proc and /sys/fs/cgroup: this process's group, and what their files say."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "proc", tmp_path / "cgroup"


V2 = {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
V1 = {
    "cpu,cpuacct/cpu.cfs_quota_us": "50000",
    "cpu,cpuacct/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/x/cpu.cfs_quota_us": "-1",
    "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/a/b", V2, 1.5),
        ("0::/", V2, None),
        # A container that sees its own group as the mount, by the name that it has outside.
        ("0::/docker/1234", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/../other", {"cpu.max": "200000 100000"}, 2.0),
        ("4:memory:/\n3:cpu,cpuacct:/x", V1, 0.5),
        ("4:memory:/x", V1, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/", {}, None),
    ],
)
def test_quotas_of_control_groups_are_found(
    tmp_path: Path, line: str, files: dict[str, str], cores: float | None
) -> None:
    found = cpu_quota(*groups(tmp_path, line, files))
    assert (found and found.cores) == cores


def test_a_quota_allows_fewer_cores_than_there_are() -> None:
    def ranks(*quotas: CpuQuota | None) -> list[Identity]:
        told = [q or CpuQuota("", 0.0) for q in quotas]
        return [
            one._replace(quota_group=q.group, quota_cores=q.cores)
            for one, q in zip(world(*["0-7"] * 4), told, strict=True)
        ]

    one, other = CpuQuota("one", 1.5), CpuQuota("other", 0.5)
    together = ranks(one, one, one, one)
    assert ranks_per_core(together) == 4 / 1.5
    assert cores_shared_by(together, 0) == 1
    assert ranks_per_core(ranks(one, one, other, other)) == 2
    assert cores_shared_by(ranks(one, one, other, other), 3) == 2
    # A rank without a quota may use every core.
    assert ranks_per_core(ranks(one, one, one, None)) == 1
    assert cores_shared_by(ranks(one, one, one, None), 0) == 8
    (first, *_) = together
    assert Identity.from_bytes(first.to_bytes()) == first
    with pytest.raises(ValueError):
        Identity.from_bytes(first._replace(quota_cores=-1.0).to_bytes())


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A group of this machine with a quota of half a core, for processes of the test."""
    path = next((p for p in Path("/sys/fs/cgroup").glob("cpu*/cpu.cfs_quota_us")), None)
    v1 = path is not None
    top = path.parent if path is not None else Path("/sys/fs/cgroup")
    group = top / f"pycoll-test-{os.getpid()}"
    try:
        group.mkdir()
        if v1:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"needs root and control groups that it may write: {error}")
    yield group
    group.rmdir()


def test_a_real_quota_is_seen_by_ranks(control_group: Path) -> None:
    code = (
        "import os, sys\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from pycoll.cores import core_count, cpu_quota\n"
        "print(cpu_quota().cores, core_count())\n"
    )
    words = [sys.executable, "-c", code, str(control_group)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert told.split() == ["0.5", "1"]
