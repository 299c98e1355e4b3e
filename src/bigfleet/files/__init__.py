"""Checks what is read from files before a parser meets it. Imports nothing of ours."""
