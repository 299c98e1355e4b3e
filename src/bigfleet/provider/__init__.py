"""Provides the kit for capacity providers, and the providers that are shipped with it (docs/spec/provider.md).

Start reading at `bigfleet.provider.kit.core`, which answers the six calls, then
`bigfleet.provider.operations.operation_runner`, which executes them. An author of a provider needs
`bigfleet.provider.backend` only. Nothing in this package may import a transport.
"""
