"""Frees the memory of code that is no longer executed, such as the compiler's after kernels are loaded.

Code is mapped from the file, so dropped pages are read again if they are executed. Only mappings without pages that the
process changed are dropped. Only a program may call this, because it changes the whole process.
"""

import ctypes
import re
from pathlib import Path
from typing import Final

#: Of Linux's mman.h.
_MADV_DONTNEED: Final = 4
_SMAPS: Final = Path("/proc/self/smaps")
_MAPPING: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ +(\S.*)$")
_ANONYMOUS: Final = "Anonymous:"


def give_code_back(library: str) -> int:
    """Drop the unchanged pages of the library with this file name; return how many bytes of mappings that were.

    Where the system is not Linux, or does not let it, nothing is dropped.
    """
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
        lines = _SMAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (AttributeError, OSError):
        return 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    dropped_bytes = 0
    for start, end in unchanged_mappings(lines, library):
        if advise(start, end - start, _MADV_DONTNEED) == 0:
            dropped_bytes += end - start
    return dropped_bytes


def unchanged_mappings(lines: list[str], library: str) -> list[tuple[int, int]]:
    """Return where the library is mapped, as far as it is not writable and no page of it is the process's own."""
    found: list[tuple[int, int]] = []
    is_wanted = False
    for line in lines:
        mapping = _MAPPING.match(line)
        if mapping is not None:
            start, end, rights, path = mapping.groups()
            is_wanted = "w" not in rights and rights.endswith("p") and Path(path).name == library
            if is_wanted:
                found.append((int(start, 16), int(end, 16)))
        elif is_wanted and line.startswith(_ANONYMOUS) and line.split()[1] != "0":
            found.pop()
            is_wanted = False
    return found
