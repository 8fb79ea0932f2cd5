"""A survey and its findings as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from pycoll.tools.doctor.checks import ERROR, NOTE, WARNING, Finding, findings_of
from pycoll.tools.doctor.host_facts import UNLIMITED, HostFacts, size_text
from pycoll.tools.doctor.probes import Link
from pycoll.tools.doctor.survey import Survey

#: Open ways are listed up to this number; closed ones always.
_LINKS_MAX = 64
_WIDTH_MIN = 60


def is_wrong(findings: Sequence[Finding]) -> bool:
    """Return whether there is more than notes."""
    return any(one.severity != NOTE for one in findings)


def as_json(survey: Survey) -> str:
    """Return everything as a JSON text."""
    findings = findings_of(survey)
    labels = [one.label for one in survey.hosts]
    links = [
        asdict(link) | {"source": labels[link.source], "target": labels[link.target]}
        for link in survey.links
    ]
    return json.dumps(
        {
            "wrong": is_wrong(findings),
            "findings": [one._asdict() for one in findings],
            "hosts": [one.as_report() for one in survey.hosts],
            "links": links,
            "absent": survey.absent,
        },
        indent=2,
    )


def as_text(survey: Survey) -> str:
    """Return tables of hosts and ways, and the findings."""
    findings = findings_of(survey)
    parts = [table([_HOST_HEAD, *map(_host_row, survey.hosts)])] if survey.hosts else []
    if survey.links:
        parts.append("\n".join([table(list(_link_rows(survey))), *_links_left_out(survey)]))
    if findings:
        parts.append("\n".join(line for one in findings for line in _lines_of(one)))
    parts.append(_summary(findings))
    return "\n\n".join(parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns that are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)) for r in rows
    )
    return "\n".join(line.rstrip() for line in lines)


_HOST_HEAD = (
    *("host", "pycoll", "Python", "cores", "open files", "locked memory", "/dev/shm"),
    *("name resolves to", "interfaces"),
)


def _host_row(one: HostFacts) -> tuple[str, ...]:
    cores = f"{one.cores}, quota {one.quota:g}" if one.quota else str(one.cores)
    networks = [f"{o.name} {o.address}" for o in one.networks if not o.loopback]
    return (
        *(one.label, one.pycoll, one.python, cores),
        "unlimited" if one.files == UNLIMITED else str(one.files),
        "unlimited" if one.memlock == UNLIMITED else size_text(one.memlock),
        size_text(one.shm) if one.shm else "none",
        ", ".join(one.addresses) or "nothing",
        ", ".join(networks) or "loopback only",
    )


def _link_rows(survey: Survey) -> Iterator[tuple[str, ...]]:
    yield ("from", "to", "address", "interface", "by", "round trip", "rate", "clock")
    left = _LINKS_MAX
    for link in survey.links:
        if not link.failure:
            left -= 1
        if link.failure or left >= 0:
            yield _link_row(survey, link)


def _link_row(survey: Survey, link: Link) -> tuple[str, ...]:
    ends = (survey.hosts[link.source].label, survey.hosts[link.target].label)
    way = (*ends, link.address, link.device, link.via or "-")
    if link.failure:
        return (*way, link.failure, "", "")
    rate = _rate(link.rate) if link.rate else "-"
    # Adding zero makes -0.0 positive.
    clock_ms = round(link.clock_s * 1e3, 1) + 0.0
    return (*way, _seconds(link.round_trip_s), rate, f"{clock_ms:+.1f} ms")


def _links_left_out(survey: Survey) -> list[str]:
    left_out = sum(not link.failure for link in survey.links) - _LINKS_MAX
    return [f"and {left_out} open ways more (--json has them)"] if left_out > 0 else []


def _lines_of(one: Finding) -> Iterator[str]:
    width = max(_WIDTH_MIN, shutil.get_terminal_size().columns)
    for head, text in ((f"{one.severity}  {one.host}: ", one.what), ("    to do: ", one.to_do)):
        yield from textwrap.wrap(head + text, width, subsequent_indent=" " * 8)


def _summary(findings: Sequence[Finding]) -> str:
    counts = {name: sum(one.severity == name for one in findings) for name in (ERROR, WARNING)}
    told = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
    return " and ".join(told) if told else "nothing is wrong"


def _rate(value: float) -> str:
    """Return a rate as benchmarks print it, with powers of ten."""
    return f"{value / 1e9:.3g} GB/s" if value >= 1e8 else f"{value / 1e6:.3g} MB/s"


def _seconds(value: float) -> str:
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"
