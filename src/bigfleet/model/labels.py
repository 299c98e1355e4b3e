"""Names the label and metadata keys that BigFleet reads or writes, each once."""

from typing import Final

INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
ZONE: Final = "topology.kubernetes.io/zone"
REGION: Final = "topology.kubernetes.io/region"
ARCH: Final = "kubernetes.io/arch"
RACK: Final = "topology.bigfleet/rack"
CAPACITY_TYPE: Final = "bigfleet.lucy.sh/capacity-type"
TAINTS: Final = "bigfleet.lucy.sh/taints"
GPU_PRODUCT: Final = "nvidia.com/gpu.product"

METADATA_PREFIX: Final = "bigfleet.lucy.sh/"
ASSIGNED_PRIORITY: Final = METADATA_PREFIX + "assigned-priority"
ASSIGNED_INTERRUPTION_PENALTY_DOLLARS: Final = METADATA_PREFIX + "assigned-interruption-penalty-dollars"
ASSIGNED_RECLAMATION_PENALTY_DOLLARS: Final = METADATA_PREFIX + "assigned-reclamation-penalty-dollars"
ASSIGNED_NEED_FINGERPRINT: Final = METADATA_PREFIX + "assigned-need-fingerprint"
ASSIGNED_GROUP: Final = METADATA_PREFIX + "assigned-group"
ASSIGNED_SHARD: Final = METADATA_PREFIX + "assigned-shard"
