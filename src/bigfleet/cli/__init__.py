"""Implements the commands. Only this package uses the real clock, sockets, files and randomness."""
