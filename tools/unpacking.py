"""Unpacks tar archives with every supported Python.

`tarfile` has extraction filters since 3.11.4, and Debian 12 has 3.11.2. Without filters an archive is extracted as it
is: only archives whose checksum was compared, or that we wrote, may come here.
"""

import tarfile
from typing import Literal


def filtered(archive: tarfile.TarFile, name: Literal["data", "tar", "fully_trusted"]) -> tarfile.TarFile:
    """Return the archive; where Python has extraction filters, it extracts with the one of this name."""
    # An argument `filter` would be a TypeError before 3.11.4; an attribute that nothing reads is none.
    archive.extraction_filter = getattr(tarfile, f"{name}_filter", None)
    return archive
