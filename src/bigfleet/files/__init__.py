"""Protects files: private modes, detection of deleted or replaced files, online backups, safe YAML loading.

This package does not depend on the content of a file or imports another package of BigFleet.
"""
