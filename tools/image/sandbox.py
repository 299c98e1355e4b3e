"""Runs programs inside a root file system, with mounts and processes of its own and without this host's environment."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

#: Mounts last as long as the process, because its mount namespace does.
_SCRIPT: Final = """
set -e
root="$1" state="$2" user="$3"
shift 3
if [ "$user" != 0 ]; then
  mount --bind "$root" "$root"
  mount --options remount,bind,ro "$root"
fi
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp" -o mode=1777
mount -t tmpfs tmpfs "$root/dev" -o mode=755
mkdir -m 1777 "$root/dev/shm"
for device in null zero urandom; do
  : > "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
if [ -n "$state" ]; then
  mount --bind "$state" "$root/var/lib/bigfleet"
fi
# In a user namespace no groups can be set.
if [ "$user" = 0 ]; then
  exec /usr/sbin/chroot "$root" "$@"
fi
exec /usr/sbin/chroot --userspec="$user:$user" "$root" "$@"
"""


def sandboxed(
    root: Path, command: Sequence[str], environment: Mapping[str, str], *, user: int = 0, state: Path | None = None
) -> list[str]:
    """Return the command that runs `command` inside a root, as its first process.

    A user other than 0 gets a root that cannot be written to, as in a restricted pod, and must be run by root. `state`
    is the folder that it sees as /var/lib/bigfleet. The network is that of this host.
    """
    mapped = ["--map-root-user"] if os.geteuid() else []
    return [
        *("env", "--ignore-environment", *(f"{name}={value}" for name, value in sorted(environment.items()))),
        *("/usr/bin/unshare", *mapped, "--mount", "--pid", "--ipc", "--fork", "--kill-child"),
        *("/bin/sh", "-c", _SCRIPT, "sandbox", str(root), str(state or ""), str(user), *command),
    ]
