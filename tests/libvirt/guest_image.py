"""Builds the disk image of a guest that boots in seconds under emulation, from packages of Debian.

Debian's cloud kernel, busybox, qemu-ga and syslinux on a FAT file system of 48 MiB; nothing is downloaded. The guest
stands for an image with cloud-init: it reads the seed with the label CIDATA, joins the cluster that the user data
names, and runs user data that are a script. With a network, which has the addresses of user-mode networking, the
script has openssl, and is run again with `leave` before the guest is off. What the guest does it says on its serial
console:

    BF-BOOT instance=op-… host=bf-…            each boot
    BF-DISK clean | BF-DISK used-by team-a     what an earlier tenant left on its disk
    BF-JOIN by=seed cluster=team-a             a line `# join team-a` in the user data
    BF-JOIN by=agent cluster=… blob=… sum=… mode=600 /opt/bigfleet/bootstrap; cluster `refuse` ends it with 7
    BF-DRAIN cluster=… grace=…                 /opt/bigfleet/drain
    BF-OFF                                     the power button
"""

import gzip
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_MIB: Final = 1 << 20
_DISK_BYTES: Final = 48 * _MIB
_MODULES: Final = (
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "isofs",
    "vfat",
    "nls_cp437",
    "nls_ascii",
    "button",
    "evdev",
)
_NETWORK_MODULES: Final = ("virtio_net",)
#: Debian's path, which the kernel and syslinux share.
_BOOT: Final = Path("/boot")

_INIT: Final = r"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /seed /disk /run /tmp /var/run /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done < /modules/order
exec > /dev/ttyS0 2>&1 < /dev/null
mount -t vfat /dev/vda /disk
mount -t iso9660 -o ro /dev/vdb /seed
instance=$(sed -n 's/.*"instance-id": "\([^"]*\)".*/\1/p' /seed/meta-data)
host=$(sed -n 's/.*"local-hostname": "\([^"]*\)".*/\1/p' /seed/meta-data)
hostname "$host"
echo "BF-BOOT instance=$instance host=$host"
if [ -e /disk/tenant ]; then echo "BF-DISK used-by $(cat /disk/tenant)"; else echo "BF-DISK clean"; fi
cluster=$(sed -n 's/^# join \(.*\)$/\1/p' /seed/user-data)
if [ -n "$cluster" ]; then
    echo "$cluster" > /disk/tenant; sync
    echo "BF-JOIN by=seed cluster=$cluster"
fi
if [ -e /sys/class/net/eth0 ]; then ip addr add 10.0.2.15/24 dev eth0; ip link set eth0 up; fi
if [ "$(head -c 2 /seed/user-data)" = '#!' ]; then
    cp /seed/user-data /run/user-data
    sh /run/user-data &
fi
mkdir -p /dev/virtio-ports
for port in /sys/class/virtio-ports/*; do
    [ -e "$port/name" ] && ln -sf "/dev/${port##*/}" "/dev/virtio-ports/$(cat "$port/name")"
done
off() { [ -e /run/user-data ] && sh /run/user-data leave; echo BF-OFF; sync; umount /disk; poweroff -f; }
# The first event of a button is its press.
for button in /dev/input/event*; do (head -c 24 "$button" > /dev/null && off) & done
while :; do
    qemu-ga -m virtio-serial -p /dev/virtio-ports/org.qemu.guest_agent.0 -t /run > /dev/null 2>&1; sleep 1
done
"""

_BOOTSTRAP: Final = r"""#!/bin/sh
blob=/opt/bigfleet/bootstrap.blob
sum=$(sha256sum < $blob | cut -c 1-8)
echo "BF-JOIN by=agent cluster=$1 blob=$(wc -c < $blob) sum=$sum mode=$(stat -c %a $blob)" > /dev/ttyS0
[ "$1" = refuse ] && exit 7
echo "$1" > /disk/tenant
sync
"""

_DRAIN: Final = """#!/bin/sh
echo "BF-DRAIN cluster=$1 grace=$2" > /dev/ttyS0
"""


def build_image(target: Path, *, has_network: bool = False) -> None:
    """Write the image. One with a network takes some seconds longer to boot."""
    kernel = max(_BOOT.glob("vmlinuz-*-cloud-*"))
    initrd = target.with_suffix(".initrd")
    initrd.write_bytes(gzip.compress(_archive(_files(kernel.name.removeprefix("vmlinuz-"), has_network)), 1))
    config = target.with_suffix(".cfg")
    config.write_text(
        "DEFAULT guest\nPROMPT 0\nTIMEOUT 0\nLABEL guest\n LINUX kernel\n INITRD initrd\n"
        # Waiting for a clock to be stable takes most of an emulated boot.
        " APPEND console=ttyS0 quiet loglevel=3 tsc=reliable lpj=4000000 panic=-1 random.trust_cpu=on mitigations=off\n"
    )
    target.write_bytes(b"")
    with target.open("r+b") as image:
        image.truncate(_DISK_BYTES)
    _run("mformat", "-i", str(target), "-F", "-v", "GUEST", "-t", "96", "-h", "64", "-s", "16", "::")
    for source, name in ((kernel, "kernel"), (initrd, "initrd"), (config, "syslinux.cfg")):
        _run("mcopy", "-i", str(target), str(source), f"::{name}")
    _run("syslinux", "--install", str(target))
    initrd.unlink()
    config.unlink()


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}{done.stdout}"


def _files(release: str, has_network: bool) -> dict[str, tuple[int, bytes]]:
    """Return the content of the guest's memory file system: mode and bytes by path."""
    files = {
        "init": (0o755, _INIT.encode()),
        "opt/bigfleet/bootstrap": (0o755, _BOOTSTRAP.encode()),
        "opt/bigfleet/drain": (0o755, _DRAIN.encode()),
        "bin/busybox": (0o755, _program("busybox").read_bytes()),
    }
    for program in map(_program, ("qemu-ga", *(("openssl",) if has_network else ()))):
        files[f"bin/{program.name}"] = (0o755, program.read_bytes())
        for library in _libraries(program):
            files[str(library).lstrip("/")] = (0o755, library.read_bytes())
    modules = _modules(Path("/lib/modules") / release, (*_MODULES, *(_NETWORK_MODULES if has_network else ())))
    for module in modules:
        files[f"modules/{module.name}"] = (0o644, module.read_bytes())
    files["modules/order"] = (0o644, "".join(f"{module.name}\n" for module in modules).encode())
    return files


def _program(name: str) -> Path:
    paths = [Path(folder) / name for folder in ("/bin", "/usr/bin", "/usr/sbin")]
    return next(path for path in paths if path.exists())


def _libraries(program: Path) -> list[Path]:
    """Return the shared libraries of a program under the paths at which its loader looks for them."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    words = [word for line in done.stdout.splitlines() for word in line.split()]
    return [Path(word) for word in words if word.startswith("/")]


def _modules(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of modules and of what they need, in the order in which they are loaded."""
    needs: dict[str, list[str]] = {}
    for line in (root / "modules.dep").read_text().splitlines():
        path, _colon, others = line.partition(":")
        needs[path] = others.split()
    built_in = {Path(line).name for line in (root / "modules.builtin").read_text().splitlines()}
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}
    for name in names:
        if f"{name}.ko" in built_in:
            continue
        path = by_name[name]
        # Those that are needed first come last.
        ordered.update(dict.fromkeys([*reversed(needs[path]), path]))
    return [root / path for path in ordered]


def _archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """Return a cpio archive in the format `newc`."""
    parts: list[bytes] = []
    folders = {str(parent) for path in files for parent in Path(path).parents if str(parent) != "."}
    entries = [(folder, 0o040755, b"") for folder in sorted(folders)]
    entries += [(path, 0o100000 | mode, content) for path, (mode, content) in files.items()]
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
        parts += [head, bytes(-len(head) % 4), content, bytes(-len(content) % 4)]
    return b"".join(parts)
