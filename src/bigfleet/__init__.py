"""BigFleet decides which machine serves which Kubernetes cluster."""


def installed_version() -> str:
    """Return the version of the installed package; read when asked, because the metadata costs 50 ms to import."""
    from importlib.metadata import version

    return version("bigfleet")
