"""The identity of this process and machine, in a form that other ranks can compare."""

from __future__ import annotations

import hashlib
import os
import socket

_token: tuple[int, str] = (0, "")


def process_name() -> str:
    """Return "host:pid", for texts."""
    return f"{socket.gethostname()}:{os.getpid()}"


def process_token() -> str:
    """Return a text that is equal for all threads of this process and differs in every other
    process, forked children included."""
    global _token  # noqa: PLW0603
    if _token[0] != os.getpid():
        _token = (os.getpid(), os.urandom(16).hex())
    return _token[1]


def process_identity() -> str:
    """Return the identity of this process for `still_runs`: machine, pid namespace, pid and start
    time. A forked child has another one."""
    return f"{machine_identity()} {_pid_namespace()} {os.getpid()} {_start_time(os.getpid())}"


def still_runs(identity: str) -> bool:
    """Return whether the process with this `process_identity` is known to run.

    False for a process of another machine, which cannot be checked, and for text that is no
    identity.
    """
    parts = identity.split(" ")
    if len(parts) != 4 or parts[:2] != [machine_identity(), _pid_namespace()]:
        return False
    pid, beginning = parts[2:]
    return pid.isdigit() and beginning != "" and _start_time(int(pid)) == beginning


def _pid_namespace() -> str:
    """Return the pid namespace, in which process numbers are unique."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _start_time(pid: int) -> str:
    """Return the start time of the process in clock ticks of the kernel; "" if no process with this
    number runs."""
    fields = read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "XZ" else ""


def machine_identity() -> str:
    """Return a text that is equal for two processes exactly if they can reach each other's
    abstract unix sockets.

    That requires one kernel and one network namespace. Virtual machines cloned from one image share
    the boot id and the numbers of namespaces, so the text also covers the hardware addresses.
    """
    parts = [read_file("/proc/sys/kernel/random/boot_id"), read_file("/etc/machine-id")]
    try:
        namespace = os.stat("/proc/self/ns/net")
        parts.append(f"{namespace.st_dev}:{namespace.st_ino}")
    except OSError:
        parts.append(socket.gethostname())
    devices = [f"/sys/class/net/{name}" for name in names_in("/sys/class/net")]
    parts += [read_file(f"{one}/address") for one in devices if os.path.exists(f"{one}/device")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def read_file(path: str | os.PathLike[str]) -> str:
    """Return the stripped text of a file; an empty text if it cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def names_in(folder: str) -> list[str]:
    """Return the sorted names in a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
