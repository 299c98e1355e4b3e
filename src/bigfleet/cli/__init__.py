"""Implements the commands: here clocks, sockets, files and randomness become real."""
