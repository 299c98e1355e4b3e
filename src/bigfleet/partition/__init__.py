"""Allocates instances on partitioned hosts so that the fleet stays as open as possible.

Hosts with exclusive storage are carved into instances that are never moved (docs/spec/partition.md). `metric` counts
what still fits and compares what a placement costs, `hosts` says whether an instance fits, `search` chooses one host
or a pair, `allocator` keeps hosts up to date, and `document`, `cluster`, `request` and `reply` speak Ganeti's
IAllocator messages. It is pure: it reads no file, no clock and no chance. It imports only the standard library,
because `hail-dedicated` starts again for each question (docs/adr/0120-the-allocator-starts-anew.md).
"""
