"""Protects files: private modes, detection of deleted or replaced files, online backups, safe YAML loading.

Nothing here depends on the content of a file or imports another package of BigFleet.
"""
