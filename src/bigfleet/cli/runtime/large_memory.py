"""Keeps freed memory of large answers in the process for the next answer.

A full List of 100,000 machines has 50 MB. gRPC copies it while it holds the interpreter; into fresh pages that takes
seven times as long as into pages that the process has. No library may call this module, because it changes the whole
process.
"""

import ctypes
from typing import Final

#: Of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
#: Answers up to this size reuse memory; that much of it may stay with the process between calls.
RETAINED_BYTES_MAX: Final = 256 * 1024 * 1024


def keep_large_memory() -> bool:
    """Let allocations up to `RETAINED_BYTES_MAX` reuse retained memory; return False where malloc cannot."""
    try:
        change = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(change(_M_MMAP_THRESHOLD, RETAINED_BYTES_MAX)) and bool(change(_M_TRIM_THRESHOLD, RETAINED_BYTES_MAX))
