"""`bigfleet audit`: whether the record of what a shard did is whole.

`command` has the flags, reads the files and says what was found; the check itself is
`bigfleet.shard.audit.verification`.
"""
