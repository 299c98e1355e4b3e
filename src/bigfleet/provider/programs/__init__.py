"""Runs programs of a user: one process a call, JSON on standard input, bounded output, redacted errors."""
