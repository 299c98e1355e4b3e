"""Runs `bigfleet provider libvirt` for the conformance suite: each of its clusters has every node Ready.

python -m tests.libvirt.certified_provider ARGUMENTS…
"""

import sys
from unittest.mock import patch

from bigfleet.cli.main import main
from bigfleet.cli.provider.node_readiness import KubeconfigNodes


async def _is_ready(_self: KubeconfigNodes, _cluster: str, _node_name: str) -> bool:
    return True


if __name__ == "__main__":
    sys.argv[0] = "bigfleet"
    with patch.object(KubeconfigNodes, "is_ready", _is_ready):
        main()
