"""Protects state files on disk: private modes, detection of deleted or replaced files, online backups.

Shard, provider and coordinator use it. Nothing here knows what a file holds.
"""
