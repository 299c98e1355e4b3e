"""Protects files: private modes, detection of deleted or replaced ones, online backups, text that is nested too deep.

Nothing here knows what a file holds, and nothing of ours is imported.
"""
