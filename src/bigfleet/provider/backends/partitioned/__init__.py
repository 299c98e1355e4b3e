"""Offers partitioned hosts: machines are instances carved from physical hosts (docs/spec/provider.md §22).

`hosts_file` reads which hosts there are, `rooms` counts what still fits on them, `slots` numbers what is offered, and
`backend` puts the three behind the kit. Who chooses a host is an `Allocator` (`ports`), who carves is a `Driver`. This
package must never import `bigfleet.partition`: a command brings the two together.
"""
