"""Runs a command in a throw-away virtual machine that has RDMA devices (Soft-RoCE, rdma_rxe).

    python tests/rdma/guest.py [--timeout S] [--package NAME]... -- COMMAND [ARG...]

The machine runs Debian's kernel under QEMU, emulated, so it needs neither KVM nor root. Its root is
that of this machine, read-only below a file system in memory: programs and virtual environments run
there as they are, as root, and nothing they write stays. User code is 15 to 20 times slower than
here. There are ``DEVICES`` hosts on one bridge: interface veI, address 10.77.0.(I+1) and RDMA
device rxeI; they reach each other by packets that cross the bridge.

Exit status: the command's; 124 when the time is over, 125 when the machine broke.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from guest_image import Archive, BrokenGuestError, modules_in_order, prepare

DEVICES = 4
#: The interfaces' packets; carries RDMA packets of 4096 bytes.
MTU = 4200
ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / "build/rdma"
BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
RDMA_MODULES = ("rdma_rxe", "ib_uverbs", "veth", "bridge", "sch_netem")
#: Of the environment this goes in.
KEPT = re.compile(r"(PATH|HOME|LANG|LC_.*|CI|VIRTUAL_ENV|PYTHON.*|PYCOLL.*)$")

INIT = r"""#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
B=/bin/busybox
$B mkdir -p /proc /sys /dev /lower /layer /rw /new
$B mount -t devtmpfs dev /dev; $B mount -t proc proc /proc; $B mount -t sysfs sys /sys
for m in $($B cat /job/first); do $B insmod /job/$m; done
P=trans=virtio,version=9p2000.L,msize=512000,cache=loose
$B mount -t 9p -o ro,$P root /lower && $B mount -t 9p -o ro,$P layer /layer &&
$B mount -t tmpfs -o mode=755,size=75% rw /rw && $B mkdir /rw/up /rw/work &&
$B mount -t overlay -o lowerdir=/layer:/lower,upperdir=/rw/up,workdir=/rw/work root /new ||
  $B reboot -f
cd /new
$B mount --move /dev dev; $B mount --move /proc proc; $B mount --move /sys sys
$B mkdir -p dev/pts dev/shm run tmp
$B mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts dev/pts
for t in dev/shm run; do $B mount -t tmpfs -o mode=1777 tmpfs $t; done
$B mkdir -p run/guest run/lock; $B cp -r /job/. run/guest; $B cp $B run/guest/busybox
exec $B switch_root /new /bin/sh /run/guest/second
"""

# Still the first process. A virtio port can be open only once, so output goes there by `cat`.
SECOND = r"""
B=/run/guest/busybox
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
ulimit -l unlimited; ulimit -n 65536
$B hostname guest; echo 127.0.0.1 guest >> /etc/hosts
for m in $($B cat /run/guest/then); do $B insmod /run/guest/$m; done
sh -e /run/guest/setup || { echo "the setup failed"; sleep 0.2; $B reboot -f; }
for p in 1 2; do
  $B mkfifo /run/guest/p$p; $B cat /run/guest/p$p >/dev/vport0p$p & eval c$p=$!
done
exec 3>/dev/vport0p3
$B setsid /run/guest/command </dev/null >/run/guest/p1 2>/run/guest/p2 3>&-
rc=$?
n=0
while [ $n -lt 40 ] && { kill -0 $c1 || kill -0 $c2; } 2>/dev/null; do
  n=$((n+1)); $B usleep 50000
done
echo "exit $rc" >&3
$B reboot -f
$B sleep 60
"""


def network() -> str:
    """Makes the hosts, all in one network namespace, the only one that rxe knows. Left alone, the
    kernel would take a packet between two of its own addresses over ``lo``, where no RDMA device
    listens; the rules make it leave by its sender's interface."""
    links = [
        f"link add br0 mtu {MTU} type bridge forward_delay 0 mcast_snooping 0",
        "link set br0 up",
        "rule add pref 100 lookup local",
        "rule del pref 0",
    ]
    devices = []
    for i in range(DEVICES):
        address, table = f"10.77.0.{i + 1}", 1000 + i
        links += [
            f"link add ve{i} mtu {MTU} type veth peer name pt{i} mtu {MTU}",
            f"link set pt{i} master br0 up",
            f"addr add {address}/16 dev ve{i}",
            f"link set ve{i} up",
            f"route add local {address} dev ve{i} table {table}",
            f"route add 10.77.0.0/16 dev ve{i} src {address} table {table}",
            f"rule add pref 10 iif lo from {address} lookup {table}",
        ]
        devices.append(f"link add rxe{i} type rxe netdev ve{i}")
    settings = {
        "ipv4/conf/all/accept_local": 1,
        "ipv4/conf/default/accept_local": 1,
        "ipv4/conf/all/rp_filter": 0,
        "ipv4/conf/default/rp_filter": 0,
        "ipv4/conf/all/arp_ignore": 1,
        "ipv4/conf/all/arp_announce": 2,
        "ipv6/conf/default/accept_dad": 0,
    }
    lines = [f"date -s @{int(time.time()) + 2} >/dev/null", "ip link set lo up"]
    lines += [f"echo {value} > /proc/sys/net/{key}" for key, value in settings.items()]
    for tool, commands in (("ip -batch", links), ("rdma -b", devices)):
        lines.append(f"{tool} - <<'END'\n" + "\n".join(commands) + "\nEND")
    lines.append("chmod 666 /dev/infiniband/*")  # as udev's rules do
    return "\n".join(lines)


def first_root(image: Path, command: list[str]) -> bytes:
    """The archive that the kernel starts from."""
    first = modules_in_order(image, BOOT_MODULES)
    then = [m for m in modules_in_order(image, RDMA_MODULES) if m not in first]
    kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
    job = ["#!/bin/sh", *(f"export {name}={shlex.quote(v)}" for name, v in kept.items())]
    job += [f"cd {shlex.quote(os.getcwd())} || exit 125", f"exec {shlex.join(command)}"]
    archive = Archive()
    for folder in ("bin", "job"):
        archive.add(folder, mode=0o040755)
    archive.add("init", INIT.encode(), 0o100755)
    archive.add("bin/busybox", (image / "busybox").read_bytes(), 0o100755)
    for module in first + then:
        archive.add(f"job/{module.name}", module.read_bytes())
    archive.add("job/first", "\n".join(m.name for m in first).encode())
    archive.add("job/then", "\n".join(m.name for m in then).encode())
    archive.add("job/second", SECOND.encode())
    archive.add("job/setup", network().encode())
    archive.add("job/command", "\n".join(job).encode(), 0o100755)
    return archive.whole()


def machine(image: Path, scratch: Path, ports: list[int]) -> list[str]:
    """QEMU's command line. Without the three features of the processor its stand-ins run, which are
    faster than their emulation."""
    kernel = "console=ttyS0 panic=-1 reboot=t mitigations=off nokaslr quiet random.trust_cpu=on"
    kernel += " no_timer_check tsc=reliable cryptomgr.notests audit=0"
    command = ["qemu-system-x86_64", "-M", "pc", "-accel", "tcg,thread=multi"]
    command += ["-cpu", "max,-pclmulqdq,-erms,-fsrm", "-smp", "2", "-m", "2G", "-display", "none"]
    command += ["-nodefaults", "-no-user-config", "-no-reboot", "-append", kernel]
    command += ["-kernel", str(image / "vmlinux"), "-initrd", str(scratch / "initrd")]
    command += ["-serial", f"file:{scratch / 'console'}", "-device", "virtio-serial-pci"]
    for number, fd in enumerate(ports, 1):
        command += ["-add-fd", f"fd={fd},set={number}", "-chardev"]
        command += [f"file,id=c{number},path=/dev/fdset/{number},append=on", "-device"]
        command += [f"virtserialport,chardev=c{number},nr={number}"]
    for tag, path in (("root", "/"), ("layer", str(image / "layer"))):
        share = f"local,id={tag},path={path},security_model=none,readonly=on,multidevs=remap"
        command += ["-fsdev", share, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return command


def run(command: list[str], timeout_s: float, packages: list[str]) -> int:
    """Boot, run, copy the output; the exit status."""
    image = prepare(CACHE, packages)
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        scratch = Path(folder)
        (scratch / "initrd").write_bytes(first_root(image, command))
        pipes = [os.pipe() for _ in range(3)]
        inner = [write for _, write in pipes]
        with (scratch / "qemu").open("wb") as log:
            process = subprocess.Popen(
                machine(image, scratch, inner),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=inner,
            )
        for fd in inner:
            os.close(fd)
        try:
            return follow([read for read, _ in pipes], timeout_s, scratch)
        finally:
            process.kill()
            process.wait()
            for read, _ in pipes:
                os.close(read)


def follow(ports: list[int], timeout_s: float, scratch: Path) -> int:
    """Copy what comes from the machine until it tells an exit status."""
    ends = time.monotonic() + timeout_s
    selector = selectors.DefaultSelector()
    for fd in ports:
        selector.register(fd, selectors.EVENT_READ)
    control, status = b"", None
    while selector.get_map():
        left = ends - time.monotonic()
        if left <= 0:
            print(f"guest: {timeout_s:g} s are over; its console:\n{tail(scratch / 'console')}")
            return 124
        for key, _ in selector.select(min(left, 1.0)):
            data = os.read(key.fd, 65536)
            if not data:
                selector.unregister(key.fd)
            elif key.fd == ports[2]:
                control += data
                told = re.search(rb"exit (\d+)\n", control)
                status = int(told[1]) if told is not None else None
            else:
                os.write(1 if key.fd == ports[0] else 2, data)
        if status is not None and not selector.select(0):
            return status
    print(f"guest: it broke:\n{tail(scratch / 'qemu')}\n{tail(scratch / 'console')}")
    return 125


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-25:]) if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="boot included")
    parser.add_argument("--package", action="append", default=[], help="Debian's, for in there")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    if shutil.which("qemu-system-x86_64") is None:
        parser.error("no QEMU; apt-get install --no-install-recommends qemu-system-x86")
    try:
        return run(arguments.command, arguments.timeout, arguments.package)
    except BrokenGuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
