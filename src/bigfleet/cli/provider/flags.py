"""Declares the flags that every provider has, and reads them.

docs/spec/provider.md §19. `provider_command` adds them to the flags of a command. A flag must never be accepted and
then ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Concatenate, ParamSpec, TypeVar

import typer

from bigfleet.cli.flags.groups import taking
from bigfleet.cli.flags.switches import SwitchCommand
from bigfleet.cli.flags.tls import (
    SERVER_TLS_OPTIONS,
    TLS_SECTION,
    Insecure,
    TlsCa,
    TlsCert,
    TlsKey,
    parse_listen_address,
    read_tls,
)
from bigfleet.cli.flags.values import (
    check_log_level,
    parse_duration_seconds,
    parse_optional_address,
    parse_positive_duration_seconds,
)
from bigfleet.cli.provider.process_settings import ProviderProcessSettings
from bigfleet.cli.runtime.failures import UsageFault
from bigfleet.model.ids import identifier_fault
from bigfleet.provider.kit.options import CoreOptions
from bigfleet.provider.storage.blob_encryption import KeyFault, read_key

P = ParamSpec("P")
R = TypeVar("R")


class ProviderCommand(SwitchCommand):
    """A command that serves a provider, with its options under headings; those of its backend come last."""

    sections: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "Provider": ("--addr", "--provider", "--metrics-addr", "--reflection", "--log-level"),
            "State": ("--state", "--state-sync", "--intent-key", "--seed-count", "--offerings", "--use-fake-backend"),
            "Operations": ("--transition-timeout", "--reconcile-interval", "--failed-hold"),
            TLS_SECTION: (*SERVER_TLS_OPTIONS, "--certify"),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFlags:
    """The flags of every provider as given on the command line, not yet checked."""

    addr: Annotated[str, typer.Option(help="Listen address of the gRPC server.")] = "127.0.0.1:9100"
    provider: Annotated[
        str | None,
        typer.Option(help="Name of the provider, also the prefix of its machine ids. [default: the backend's]"),
    ] = None
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="State file. Required unless the backend is a fake.")
    ] = None
    state_sync: Annotated[str, typer.Option(help="full survives a power loss, normal only a killed process.")] = "full"
    use_fake_backend: Annotated[
        bool,
        typer.Option(
            "--use-fake-backend/--no-use-fake-backend",
            help="Replace the backend with a fake; no real machine is touched.",
        ),
    ] = False
    seed_count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of slots to create at the first start, instead of the backend's fleet."),
    ] = None
    offerings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of the slots on offer; reloaded on SIGHUP.")
    ] = None
    intent_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Key file of 32 bytes; encrypts stored bootstrap blobs, so that Configure resumes after a restart.",
        ),
    ] = None
    metrics_addr: Annotated[str, typer.Option(help="Listen address of /metrics, /healthz and /readyz, or off.")] = (
        "127.0.0.1:9101"
    )
    reflection: Annotated[bool, typer.Option("--reflection/--no-reflection", help="Serve gRPC reflection.")] = True
    transition_timeout: Annotated[
        str | None, typer.Option(help="Timeout of each operation; by default it depends on the kind.")
    ] = None
    reconcile_interval: Annotated[
        str,
        typer.Option(
            help="Time between reconciliations of the inventory; BigFleetProviderInventoryStale fires after 10m."
        ),
    ] = "60s"
    failed_hold: Annotated[
        str, typer.Option(help="Time after which a FAILED machine is recovered automatically; 0 disables it.")
    ] = "10m"
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    insecure: Insecure = False
    certify: Annotated[
        bool,
        typer.Option("--certify/--no-certify", help="Accept any fencing token from an admin, for a conformance run."),
    ] = False
    log_level: Annotated[str, typer.Option(help="Minimum log level: debug, info, warning or error.")] = "info"

    def process(self, *, name: str, may_forget: bool) -> ProviderProcessSettings:
        """Return the settings of the process; `name` is the backend's, `may_forget` says that it needs no state file.

        Raises UsageFault naming the flag.
        """
        if self.state is None and not may_forget:
            raise UsageFault("--state is missing: the provider stores its machines in this file; name a file")
        if self.seed_count is not None and self.offerings is not None:
            raise UsageFault("--seed-count and --offerings contradict each other: both say which slots there are")
        if self.state_sync not in ("full", "normal"):
            raise UsageFault(f"--state-sync: {self.state_sync!r} is unknown; choose full or normal")
        fault = identifier_fault(self.provider) if self.provider is not None else None
        if fault:
            raise UsageFault(f"--provider {fault}")
        check_log_level(self.log_level)
        tls = read_tls(self.tls_cert, self.tls_key, self.tls_ca)
        if self.certify and tls is None:
            raise UsageFault(
                "--certify needs --tls-cert, --tls-key and --tls-ca; without them every caller is accepted"
            )
        return ProviderProcessSettings(
            address=parse_listen_address(self.addr, "--addr", tls, is_insecure=self.insecure),
            metrics_address=parse_optional_address(self.metrics_addr, "--metrics-addr"),
            state_path=self.state,
            is_power_safe=self.state_sync == "full",
            provider=self.provider or name,
            reflect=self.reflection,
            tls=tls,
            certify=self.certify,
            seed_count=self.seed_count,
            offerings_path=self.offerings,
        )

    def options(self) -> CoreOptions:
        """Return how the core behaves. Raises UsageFault naming the flag."""
        try:
            intent_key = None if self.intent_key is None else read_key(self.intent_key)
        except KeyFault as fault:
            raise UsageFault(f"--intent-key: {self.intent_key} {fault}") from fault
        return CoreOptions(
            intent_key=intent_key,
            provider=self.provider,
            transition_timeout_seconds=None
            if self.transition_timeout is None
            else parse_positive_duration_seconds(self.transition_timeout, "--transition-timeout"),
            reconcile_interval_seconds=parse_positive_duration_seconds(self.reconcile_interval, "--reconcile-interval"),
            failed_hold_seconds=parse_duration_seconds(self.failed_hold, "--failed-hold"),
        )


def provider_command(
    *, without: tuple[str, ...] = (), **defaults: object
) -> Callable[[Callable[Concatenate[ProviderFlags, P], R]], Callable[..., R]]:
    """Put the flags of every provider on a command whose first parameter takes them, before its own.

    `without` names fields that make no sense there; `defaults` are this provider's own.
    """
    return taking(ProviderFlags, without=without, defaults=defaults, is_first=True)
