"""Large answers reuse memory (docs/spec/provider.md §10, §24)."""

import platform
import subprocess
import sys

import pytest

#: Copies 48 MB a few times and tells how many fresh pages the last copy took.
COPIES = """
import resource, sys
from bigfleet.cli.runtime.large_memory import keep_large_memory
if sys.argv[1] == "kept":
    assert keep_large_memory()
data = bytes(48 << 20)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    copy = bytearray(data)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del copy
print(pages)
"""


def fresh_pages(how: str) -> int:
    told = subprocess.run([sys.executable, "-c", COPIES, how], capture_output=True, text=True, check=True, timeout=60)
    return int(told.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has no such option")
def test_a_large_copy_takes_no_fresh_pages_once_memory_is_kept() -> None:
    # Pages may be huge where the system makes them so; then even the first copy takes few.
    assert fresh_pages("kept") < 50
    assert fresh_pages("given back") >= fresh_pages("kept")
