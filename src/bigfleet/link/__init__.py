"""Connects a shard to its coordinator: reports to it, and hands its instructions to the shard.

docs/spec/coordinator.md §8. Only this package knows both sides. A shard decides and acts in the same way without a link
or while the coordinator is down.
"""
