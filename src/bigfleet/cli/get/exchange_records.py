"""Converts the shard's messages about exchanges to plain records, in the format of `bigfleet.cli.get.records`."""

import math
from collections.abc import Iterator
from typing import Any

from bigfleet.cli.get.records import Record, time_text
from bigfleet.rpc.wire.convert_machine import capacity_type_from_wire
from bigfleet.rpc.wire.gen import shardread_pb2


def exchange_records(view: shardread_pb2.ClusterExchangesView) -> Iterator[Record]:
    """Yield a record of each exchange that a cluster began and of each proposal, or one that says why there is none."""
    cluster = {
        "cluster": view.cluster_id,
        "computedAt": time_text(view.computed_at_unix_nanos),
        "clusterMachines": view.machines,
        "clusterCostUsdPerHour": view.cost_usd_per_hour,
        "blocked": view.blocked or None,
        "excluded": dict(sorted(view.excluded.items())),
    }
    nothing: dict[str, Any] = dict.fromkeys(_OF_EXCHANGES)
    for run in view.runs:
        yield {
            **cluster,
            **nothing,
            "exchangeId": run.exchange_id,
            "phase": run.phase,
            "end": run.end or None,
            "begunAt": time_text(run.begun_unix_nanos),
            "endedAt": time_text(run.ended_unix_nanos) if run.ended_unix_nanos else None,
            "goes": [_machines(each) for each in run.goes],
            "comes": [_machines(each) for each in run.comes],
            "machineIds": list(run.machine_ids),
            "cameIds": list(run.came_ids),
            "left": run.left,
            "savingUsdPerHour": run.promised_usd_per_hour,
            "realisedUsdPerHour": run.realised_usd_per_hour if run.end else None,
            "taker": run.taker or None,
            "giverExchangeId": run.giver_exchange_id or None,
            "sentences": list(run.sentences),
        }
    for proposal in view.proposals:
        yield {
            **cluster,
            **nothing,
            "kind": proposal.kind,
            "gang": proposal.gang,
            "goes": [_machines(each) for each in proposal.goes],
            "comes": [_machines(each) for each in proposal.comes],
            "machineIds": list(proposal.machine_ids),
            "waves": proposal.waves,
            "savingUsdPerHour": proposal.saving_usd_per_hour,
            "breakEvenSeconds": proposal.break_even_seconds if math.isfinite(proposal.break_even_seconds) else None,
            "gainUsd": proposal.gain_usd,
            "requiredUsd": proposal.required_usd,
            "bootUsd": proposal.boot_usd,
            "doubleRunningUsd": proposal.double_running_usd,
            "reclamationUsd": proposal.reclamation_usd,
            "margin": proposal.margin,
            "holdSeconds": proposal.hold_seconds,
            "waitsFor": proposal.waits_for or None,
            "taker": proposal.taker or None,
            "takerGoes": [_machines(each) for each in proposal.taker_goes],
            "takerMachineIds": list(proposal.taker_machine_ids),
            "sentences": [*proposal.sentences, *view.sentences],
        }
    if not view.proposals and view.computed_at_unix_nanos and all(run.end for run in view.runs):
        yield {**cluster, **nothing, "sentences": list(view.sentences)}


_OF_EXCHANGES = (
    *("exchangeId", "phase", "end", "begunAt", "endedAt", "cameIds", "left", "realisedUsdPerHour"),
    *("kind", "gang", "goes", "comes", "machineIds", "waves", "savingUsdPerHour", "breakEvenSeconds", "gainUsd"),
    *("requiredUsd", "bootUsd", "doubleRunningUsd", "reclamationUsd", "margin", "holdSeconds", "waitsFor"),
    *("taker", "takerGoes", "takerMachineIds", "giverExchangeId"),
)


def _machines(message: shardread_pb2.ExchangedMachines) -> dict[str, Any]:
    return {
        "machines": message.machines,
        "instanceType": message.instance_type or None,
        "zone": message.zone or None,
        "capacityType": capacity_type_from_wire(message.capacity_type).label,
        "priceUsdPerHour": message.price_usd_per_hour,
        "idle": message.idle,
    }
