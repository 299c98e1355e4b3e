"""`bigfleet hail` and `hail-dedicated`: our allocator where Ganeti's `hail` stands (docs/partitioned-hosts.md)."""
