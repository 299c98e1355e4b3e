"""Implements `bigfleet audit`: verifies the audit log of a shard.

`command` reads flags and files and prints the findings; `bigfleet.shard.audit.verification` checks the log.
"""
