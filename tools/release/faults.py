"""Defines what a build or a check of a release raises."""


class ReleaseFault(Exception):
    """The release cannot be built or is not sound; the message says what is wrong, where, and what to do."""
