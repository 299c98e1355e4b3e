"""Builds the container image of BigFleet without a container engine; `make image` runs it.

The image has the packages of Debian in deploy/image/debian.lock, what requirements.lock pins for running BigFleet, the
wheel of this checkout, and compiled kernels. Files, times, owners and order follow from the commit, so that two builds
of a commit have one digest.
"""
