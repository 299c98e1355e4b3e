"""BigFleet decides which machine serves which Kubernetes cluster."""

from importlib.metadata import version

__version__ = version("bigfleet")
