"""What the guest is made of: Debian's kernel, some of its modules, and tools that the host lacks.

Everything comes from apt, is unpacked below one folder and never installed.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

TOOLS = ("kmod", "ibverbs-providers", "iproute2")
#: Parts of the kernel's package that are unpacked.
MODULES = (
    "modules.order",
    "modules.builtin",
    "modules.builtin.modinfo",
    "kernel/arch/x86/crypto",
    "kernel/crypto",
    "kernel/drivers/char",
    "kernel/drivers/infiniband/core",
    "kernel/drivers/infiniband/sw",
    "kernel/drivers/net/veth.ko",
    "kernel/drivers/virtio",
    "kernel/fs/9p",
    "kernel/fs/configfs",
    "kernel/fs/fscache",
    "kernel/fs/netfs",
    "kernel/fs/overlayfs",
    "kernel/lib",
    "kernel/net",
)


class BrokenGuestError(Exception):
    """The guest could not be made or did not answer."""


def output_of(*command: str | Path, cwd: Path | None = None, executable: Path | None = None) -> str:
    done = subprocess.run(
        command, check=False, text=True, capture_output=True, cwd=cwd, executable=executable
    )
    if done.returncode != 0:
        said = done.stderr.strip()[-2000:]
        raise BrokenGuestError(f"{' '.join(map(str, command))}: {said}")
    return done.stdout


def prepare(cache: Path, packages: Sequence[str] = ()) -> Path:
    """The folder with ``vmlinux``, ``busybox``, ``version`` and ``layer``; fetched if need be.

    ``packages`` are laid over this machine's root next to the tools, with what they need.
    """
    contents = " ".join([*TOOLS, *packages, *MODULES, Path(__file__).read_text()])
    done = cache / hashlib.sha256(contents.encode()).hexdigest()[:12]
    if not done.exists():
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache))
        try:
            _fetch(work, packages)
            work.rename(done)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return done


def _fetch(work: Path, packages: Sequence[str]) -> None:
    debs, layer = work / "debs", work / "layer"
    (debs / "partial").mkdir(parents=True)
    output_of("apt-get", "-qq", "update")
    depends = re.search(
        r"Depends: (linux-image-\S+)", output_of("apt-cache", "depends", "linux-image-amd64")
    )
    if depends is None:
        raise BrokenGuestError("apt knows no linux-image-amd64")
    kernel = depends[1]
    output_of("apt-get", "download", kernel, "busybox-static", cwd=debs)
    # Only what the host lacks, with what that needs.
    output_of(
        *("apt-get", "install", "-y", "--download-only", "--no-install-recommends"),
        *("-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={debs}", *TOOLS, *packages),
    )
    # Debian's root has links for these; a folder in the layer would hide them.
    (layer / "usr/lib/modules").mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (layer / "usr" / name).mkdir(exist_ok=True)
        (layer / name).symlink_to(f"usr/{name}")
    version = kernel.removeprefix("linux-image-")
    for deb in sorted(debs.glob("*.deb")):
        if deb.name.startswith(f"{kernel}_"):
            parts = [f"./lib/modules/{version}/{part}" for part in MODULES]
            _unpack(deb, layer, *parts, f"./boot/vmlinuz-{version}")
        elif deb.name.startswith("busybox-static_"):
            _unpack(deb, work, "./bin/busybox")
        else:
            _unpack(deb, layer)
    (work / "bin/busybox").rename(work / "busybox")
    kmod = next(p for p in (layer / "bin/kmod", Path("/bin/kmod")) if p.exists())
    output_of("depmod", "-b", layer, version, executable=kmod)
    image = layer / f"boot/vmlinuz-{version}"
    (work / "vmlinux").write_bytes(_kernel_inside(image.read_bytes()))
    (work / "version").write_text(version)
    shutil.rmtree(layer / "boot")
    shutil.rmtree(debs)


def _unpack(deb: Path, where: Path, *only: str) -> None:
    """Like ``dpkg -x``, which would replace the links above by folders."""
    where.mkdir(exist_ok=True)
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True)
    command = ["tar", "-xC", str(where), "--keep-directory-symlink", *only]
    done = subprocess.run(command, check=False, input=data.stdout, capture_output=True)
    # Of what is picked from a kernel, some versions lack a part.
    if done.returncode != 0 and not only:
        raise BrokenGuestError(f"cannot unpack {deb.name}: {done.stderr.decode()}")


def _kernel_inside(image: bytes) -> bytes:
    """The ELF file in a bzImage: QEMU enters it directly, which spares two seconds."""
    start = (image[0x1F1] or 4) * 512 + 512 + struct.unpack_from("<I", image, 0x248)[0]
    payload = image[start : start + struct.unpack_from("<I", image, 0x24C)[0]]
    elf = lzma.LZMADecompressor().decompress(payload)
    if elf[:4] != b"\x7fELF":
        raise BrokenGuestError("the kernel's payload is no ELF file behind xz")
    return elf


def modules_in_order(image: Path, names: tuple[str, ...]) -> list[Path]:
    """The modules and all that they need, each behind what it needs. What is built in is absent."""
    base = image / "layer/usr/lib/modules" / (image / "version").read_text()
    needs: dict[str, list[str]] = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {Path(path).stem.replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in names:
        path = by_name.get(name)
        for one in [*reversed(needs[path]), path] if path is not None else []:
            if one not in order:
                order.append(one)
    return [base / path for path in order]


class Archive(io.BytesIO):
    """A cpio archive as the kernel unpacks it into its first root."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def add(self, name: str, data: bytes = b"", mode: int = 0o100644) -> None:
        self._count += 1
        size = len(name) + 1
        fields = (self._count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, size, 0)
        self.write(b"070701" + b"".join(b"%08x" % field for field in fields))
        for part in (name.encode() + b"\0", data):
            self.write(part)
            self.write(b"\0" * (-self.tell() % 4))

    def whole(self) -> bytes:
        self.add("TRAILER!!!")
        return self.getvalue()
