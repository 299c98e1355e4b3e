"""The code of a library is given back, and comes again when it is executed."""

import subprocess
import sys

from bigfleet.cli.runtime.code_pages import give_code_back, unchanged_mappings

_PROGRAM = """
import llvmlite.binding as llvm
from bigfleet.cli.runtime.code_pages import give_code_back
from bigfleet.cli.runtime.interpreter import resident_bytes

def compiled():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("define i64 @seven() { ret i64 7 }")
    machine = llvm.Target.from_default_triple().create_target_machine()
    return len(machine.emit_object(module))

size, before = compiled(), resident_bytes()
dropped = give_code_back("libllvmlite.so")
after = resident_bytes()
print(dropped > 0, before - after > 4 * 2**20, compiled() == size, give_code_back("no-such-library.so"))
"""

_LINES = """
7f0000000000-7f0000001000 r--p 00000000 fe:00 53 /lib/libx.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000001000-7f0000003000 r-xp 00001000 fe:00 53 /lib/libx.so
Rss:                   8 kB
Anonymous:             0 kB
7f0000003000-7f0000004000 r--p 00003000 fe:00 53 /lib/libx.so
Rss:                   4 kB
Anonymous:             4 kB
7f0000004000-7f0000005000 rw-p 00004000 fe:00 53 /lib/libx.so
Anonymous:             0 kB
7f0000005000-7f0000006000 r-xs 00004000 fe:00 53 /lib/libx.so
Anonymous:             0 kB
7f0000006000-7f0000007000 r-xp 00000000 fe:00 54 /lib/my libx.so
Anonymous:             0 kB
7f0000007000-7f0000008000 rw-p 00000000 00:00 0
Anonymous:             0 kB
7f0000008000-7f0000009000 r-xp 00000000 fe:00 55 /lib/libx.so (deleted)
Anonymous:             0 kB
""".splitlines()


def test_only_unchanged_code_of_the_library_is_found() -> None:
    """No data, no page that the process has written, no other library, no file that is gone."""
    assert unchanged_mappings(_LINES, "libx.so") == [
        (0x7F0000000000, 0x7F0000001000),
        (0x7F0000001000, 0x7F0000003000),
    ]
    assert unchanged_mappings(_LINES, "my libx.so") == [(0x7F0000006000, 0x7F0000007000)]


def test_a_compiler_that_was_given_back_compiles_the_same() -> None:
    """Megabytes less are resident, and a library that is not loaded is no fault."""
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["True", "True", "True", "0"], said
    assert give_code_back("no-such-library.so") == 0
