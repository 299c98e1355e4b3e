"""Makes files and directory entries durable."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
