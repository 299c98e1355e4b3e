"""Offers partitioned hosts: machines are instances carved from physical hosts (docs/spec/provider.md §22).

`hosts_file` reads the hosts, `rooms` counts what still fits on them, `slots` numbers the offers, and `backend` connects
the three to the kit. An `Allocator` (`ports`) chooses hosts, a `Driver` carves instances. This package must never
import `bigfleet.partition`: a command connects the two.
"""
