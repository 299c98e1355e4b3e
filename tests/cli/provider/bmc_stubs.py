"""Programs in place of ipmitool and kubectl: power is a file for each BMC, and a node is Ready while its host is on."""

from pathlib import Path

from tests.guides import executable

IPMITOOL = """#!/bin/sh
while [ "$1" != chassis ]; do if [ "$1" = -H ]; then file="$STUB/$2"; fi; shift; done
case "$2 $3" in
"power status") if [ -e "$file" ]; then echo "Chassis Power is on"; else echo "Chassis Power is off"; fi ;;
"power on" | "power cycle") : > "$file" ;;
"power off" | "power soft") rm -f "$file" ;;
"bootdev pxe") ;;
*) echo "unknown: $*" >&2; exit 1 ;;
esac
"""
KUBECTL = """#!/bin/sh
if [ -n "$(ls "$STUB")" ]; then printf True; fi
"""


def write_stubs(folder: Path) -> dict[str, str]:
    """Write both into the folder's `bin` and return the variable that they need: where power is kept."""
    executable(folder / "bin" / "ipmitool", IPMITOOL)
    executable(folder / "bin" / "kubectl", KUBECTL)
    (folder / "power").mkdir()
    return {"STUB": str(folder / "power")}
