"""The wire as a table, kept by hand: messages, oneofs, reserved numbers, enums and services of `bigfleet.v1alpha1`.

The fields of the messages are in wire_fields.py and wire_fields_read.py. A change here is a change of the contract
with peers that others wrote: a number is never given a second meaning.
"""

from tests.rpc.wire.wire_fields import CAPACITY, COORDINATOR, PROVIDER, SHARD, SHARDADMIN, Fields
from tests.rpc.wire.wire_fields_read import SHARDREAD

#: Prefix of every name on the wire.
PACKAGE = "bigfleet.v1alpha1"

#: By the .proto file that holds them.
MESSAGES: dict[str, dict[str, Fields]] = {
    "capacity": CAPACITY,
    "provider": PROVIDER,
    "shard": SHARD,
    "shardread": SHARDREAD,
    "shardadmin": SHARDADMIN,
    "coordinator": COORDINATOR,
}

#: {message: {oneof: members}}
ONEOFS: dict[str, dict[str, tuple[str, ...]]] = {
    "OperatorMessage": {
        "payload": (
            "hello",
            "rollup",
            "bootstrap_response",
            "reclaim_ack",
            "node_status",
            "drain_result",
            "drain_forecast",
        )
    },
    "ShardMessage": {
        "payload": (
            "ack",
            "bootstrap_request",
            "reclaim_instruction",
            "node_state_update",
            "available_capacity",
            "need_status",
            "drain_forecast_request",
        )
    },
    "InspectNeedsResponse": {"frame": ("header", "need")},
    "ListMachinesResponse": {"frame": ("header", "machine", "end")},
    "CoordinatorInstruction": {
        "payload": (
            "assign_domain",
            "unassign_domain",
            "reassign_speculative",
            "cross_shard_drain",
            "transfer_ownership",
        )
    },
    "SnapshotSaveChunk": {"payload": ("meta_json", "data")},
}

#: Numbers that must never be used again.
RESERVED: dict[str, tuple[int, ...]] = {
    "Machine": (11,),
    "ListFilter": (2, 3),
    "CreateRequest": (2,),
    "CapacityNeed": (4,),
    "Hello": (2,),
    "NodeStateUpdate": (7,),
    "AvailableCapacityUpdate": (7, 8, 9),
    "ShardSummary": (5, 6),
    "Shortfall": (4,),
}

#: {enum: {value: number}}; a nested one is named after its message.
ENUMS: dict[str, dict[str, int]] = {
    "MachineState": {
        "MACHINE_STATE_UNSPECIFIED": 0,
        "MACHINE_STATE_SPECULATIVE": 1,
        "MACHINE_STATE_CREATING": 2,
        "MACHINE_STATE_IDLE": 3,
        "MACHINE_STATE_CONFIGURING": 4,
        "MACHINE_STATE_CONFIGURED": 5,
        "MACHINE_STATE_DRAINING": 6,
        "MACHINE_STATE_DELETING": 7,
        "MACHINE_STATE_FAILED": 8,
    },
    "CapacityType": {
        "CAPACITY_TYPE_UNSPECIFIED": 0,
        "CAPACITY_TYPE_BARE_METAL": 1,
        "CAPACITY_TYPE_RESERVED": 2,
        "CAPACITY_TYPE_ON_DEMAND": 3,
        "CAPACITY_TYPE_SPOT": 4,
    },
    "NodeSelectorRequirement.Operator": {
        "OPERATOR_UNSPECIFIED": 0,
        "OPERATOR_IN": 1,
        "OPERATOR_NOT_IN": 2,
        "OPERATOR_EXISTS": 3,
        "OPERATOR_DOES_NOT_EXIST": 4,
        "OPERATOR_SAME": 5,
    },
    "TopologySpread.WhenUnsatisfiable": {
        "WHEN_UNSATISFIABLE_UNSPECIFIED": 0,
        "WHEN_UNSATISFIABLE_DO_NOT_SCHEDULE": 1,
        "WHEN_UNSATISFIABLE_SCHEDULE_ANYWAY": 2,
    },
    "PenaltyBucket": {
        "PENALTY_BUCKET_UNSPECIFIED": 0,
        "PENALTY_BUCKET_ZERO": 1,
        "PENALTY_BUCKET_HALF_DOLLAR": 2,
        "PENALTY_BUCKET_1": 3,
        "PENALTY_BUCKET_2": 4,
        "PENALTY_BUCKET_4": 5,
        "PENALTY_BUCKET_8": 6,
        "PENALTY_BUCKET_16": 7,
        "PENALTY_BUCKET_32": 8,
        "PENALTY_BUCKET_64": 9,
        "PENALTY_BUCKET_128": 10,
        "PENALTY_BUCKET_256": 11,
        "PENALTY_BUCKET_512": 12,
        "PENALTY_BUCKET_1024": 13,
        "PENALTY_BUCKET_2048": 14,
        "PENALTY_BUCKET_4096": 15,
        "PENALTY_BUCKET_8192": 16,
        "PENALTY_BUCKET_16384": 17,
        "PENALTY_BUCKET_32768": 18,
        "PENALTY_BUCKET_65536": 19,
        "PENALTY_BUCKET_131072": 20,
        "PENALTY_BUCKET_262144": 21,
        "PENALTY_BUCKET_524288": 22,
        "PENALTY_BUCKET_1048576": 23,
        "PENALTY_BUCKET_2097152": 24,
        "PENALTY_BUCKET_4194304": 25,
        "PENALTY_BUCKET_8388608": 26,
        "PENALTY_BUCKET_PINNED": 27,
    },
    "AvailableCapacityUpdate.Confidence": {
        "CONFIDENCE_UNSPECIFIED": 0,
        "CONFIDENCE_NONE": 1,
        "CONFIDENCE_LOW": 2,
        "CONFIDENCE_MEDIUM": 3,
        "CONFIDENCE_HIGH": 4,
    },
    "DrainForecast.Outcome": {
        "OUTCOME_UNSPECIFIED": 0,
        "OUTCOME_FITS": 1,
        "OUTCOME_WOULD_NOT_FIT": 2,
    },
    "DrainResult.Outcome": {
        "OUTCOME_UNSPECIFIED": 0,
        "OUTCOME_DRAINED": 1,
        "OUTCOME_GRACE_EXPIRED": 2,
        "OUTCOME_NODE_NOT_FOUND": 3,
        "OUTCOME_FAILED": 4,
        "OUTCOME_WOULD_NOT_FIT": 100,
    },
    "UnmetReason": {
        "UNMET_REASON_UNSPECIFIED": 0,
        "UNMET_REASON_PRIORITY_STARVED": 1,
        "UNMET_REASON_NO_MATCHING_SUPPLY": 2,
        "UNMET_REASON_TOPOLOGY_UNSATISFIABLE": 3,
        "UNMET_REASON_PREEMPTION_EXHAUSTED": 4,
        "UNMET_REASON_BOOTSTRAP_REFUSED": 100,
        "UNMET_REASON_STOCKOUT": 101,
        "UNMET_REASON_REQUEST_TOO_LARGE": 102,
        "UNMET_REASON_CLUSTER_LIMIT": 103,
        "UNMET_REASON_BOOTSTRAP_FAILED": 104,
    },
    "InstructAck.Outcome": {
        "OUTCOME_UNSPECIFIED": 0,
        "OUTCOME_ACCEPTED": 1,
        "OUTCOME_REJECTED_STALE": 2,
        "OUTCOME_REJECTED_INVALID": 3,
        "OUTCOME_FAILED": 4,
    },
    "Ownership.Base": {"BASE_UNSPECIFIED": 0, "BASE_ALL": 1, "BASE_DOMAINS": 2},
    "InstructionStatus.State": {
        "STATE_UNSPECIFIED": 0,
        "STATE_PENDING": 1,
        "STATE_DELIVERED": 2,
        "STATE_DONE": 3,
        "STATE_FAILED": 4,
        "STATE_EXPIRED": 5,
        "STATE_CANCELLED": 6,
    },
}

#: {service: {method: (request, response, the client streams, the server streams)}}
SERVICES: dict[str, dict[str, tuple[str, str, bool, bool]]] = {
    "CapacityProvider": {
        "Create": ("CreateRequest", "TransitionAck", False, False),
        "Configure": ("ConfigureRequest", "TransitionAck", False, False),
        "Drain": ("DrainRequest", "TransitionAck", False, False),
        "Delete": ("DeleteRequest", "TransitionAck", False, False),
        "Get": ("MachineRef", "Machine", False, False),
        "List": ("ListFilter", "MachineList", False, False),
    },
    "Shard": {"Session": ("OperatorMessage", "ShardMessage", True, True)},
    "ShardRead": {
        "InspectNeeds": ("InspectNeedsRequest", "InspectNeedsResponse", False, True),
        "ListMachines": ("ListMachinesRequest", "ListMachinesResponse", False, True),
        "ExplainNeed": ("ExplainNeedRequest", "ExplainNeedResponse", False, False),
        "ExplainMachine": ("ExplainMachineRequest", "ExplainMachineResponse", False, False),
        "ListActions": ("ListActionsRequest", "ListActionsResponse", False, True),
        "ListSessions": ("ListSessionsRequest", "ListSessionsResponse", False, True),
        "ListExchanges": ("ListExchangesRequest", "ListExchangesResponse", False, True),
    },
    "ShardAdmin": {
        "RetireCluster": ("RetireClusterRequest", "RetireClusterResponse", False, False),
        "ReadmitCluster": ("ReadmitClusterRequest", "ReadmitClusterResponse", False, False),
    },
    "Coordinator": {
        "ReportShard": ("ShardReport", "ReportAck", False, False),
        "SnapshotSave": ("SnapshotSaveRequest", "SnapshotSaveChunk", False, True),
        "AssignDomain": ("AssignDomainRequest", "AssignDomainResponse", False, False),
        "UnassignDomain": ("UnassignDomainRequest", "UnassignDomainResponse", False, False),
        "RemoveShard": ("RemoveShardRequest", "RemoveShardResponse", False, False),
        "ListShards": ("ListShardsRequest", "ListShardsResponse", False, False),
        "ListDomainAssignments": ("ListDomainAssignmentsRequest", "ListDomainAssignmentsResponse", False, False),
        "ListShardReports": ("ListShardReportsRequest", "ListShardReportsResponse", False, False),
        "ListQuotas": ("ListQuotasRequest", "ListQuotasResponse", False, False),
        "ListProviders": ("ListProvidersRequest", "ListProvidersResponse", False, False),
        "JoinRaftCluster": ("JoinRaftClusterRequest", "JoinRaftClusterResponse", False, False),
        "BindCluster": ("BindClusterRequest", "BindClusterResponse", False, False),
        "ListClusters": ("ListClustersRequest", "ListClustersResponse", False, False),
        "SetQuota": ("SetQuotaRequest", "SetQuotaResponse", False, False),
        "UpsertProvider": ("UpsertProviderRequest", "UpsertProviderResponse", False, False),
        "ListInstructions": ("ListInstructionsRequest", "ListInstructionsResponse", False, False),
    },
}
