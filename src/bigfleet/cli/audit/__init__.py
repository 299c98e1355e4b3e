"""Implements `bigfleet audit`: verifies the audit log of a shard.

`command` has the flags, reads the files and says what was found; the check itself is
`bigfleet.shard.audit.verification`.
"""
