"""bench/rdma.py: reads what the guest tells, judges it, and writes its section. The guest itself is
not started here (make bench-rdma)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests" / "rdma"))
import guest_image
import rdma

#: As perftest prints it with --report_gbits and -b.
TABLE = """
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      200              0.98               0.96                 0.001833
"""
ROW = rdma.Row(
    2 << 20,
    {"pycoll": [0.010, 0.012, 0.011], "openmpi": [0.013, 0.012, 0.022]},
    {"pycoll": 0.03, "openmpi": 0.04},
    200e6,
)


def test_perftests_table_is_read() -> None:
    assert rdma.gigabits(TABLE) == pytest.approx(0.96)
    assert rdma.gigabits("Couldn't connect to 127.0.0.1:4700") is None


def test_a_row_is_judged_by_round_and_by_what_the_device_carries() -> None:
    assert ROW.ratio() == pytest.approx(1.3)
    assert ROW.busbw() == pytest.approx((2 << 20) / 0.011)
    assert ROW.verdicts() == [
        "UCX / pycoll 1.30 of 1.2, reached",
        "busbw / ib_write_bw 0.95 of 0.8, reached",
    ]
    alone = rdma.Row(8, {"pycoll": [1e-4]}, {"pycoll": 1e-4}, None)
    assert alone.verdicts() == [] and alone.ratio() is None


def test_the_section_is_written_and_no_other_is_touched(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text("# Results\n\n## One\n\nfirst\n")
    rdma.write_markdown(page, [ROW])
    text = page.read_text()
    assert text.startswith("# Results\n\n## One\n\nfirst\n")
    assert "| 2097152 | 11000 / 30000 | 13000 / 40000 | 191 | 200 | UCX" in text


def test_ranks_of_both_libraries_get_a_device_each() -> None:
    (launch,) = rdma.starts_in_guest("openmpi", 2, "/tmp/socket")
    assert launch.line[0] == "mpirun.openmpi" and launch.environment["UCX_TLS"] == "rc_v,self"
    assert any("rxe$OMPI_COMM_WORLD_LOCAL_RANK:1" in word for word in launch.line)
    ours = rdma.starts_in_guest("pycoll", 2, "/tmp/socket")
    assert [one.environment["PYCOLL_VERBS_DEVICES"] for one in ours] == ["rxe0", "rxe1"]
    assert {one.environment["PYCOLL_TRANSPORTS"] for one in ours} == {"verbs"}


def test_an_image_with_more_packages_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, ...]] = []
    monkeypatch.setattr(guest_image, "_fetch", lambda work, packages: fetched.append(packages))
    plain, more = (guest_image.prepare(tmp_path, names) for names in ((), rdma.PACKAGES))
    assert plain != more and fetched == [(), rdma.PACKAGES]
    assert guest_image.prepare(tmp_path, rdma.PACKAGES) == more and len(fetched) == 2
