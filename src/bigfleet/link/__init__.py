"""Connects a shard to its coordinator: reports to it, and hands its instructions to the shard.

docs/spec/coordinator.md §8. The only package that knows both sides. A shard without it, or with a coordinator that is
gone, decides and acts the same.
"""
