"""Builds and checks the artefacts of a release (docs/adr/0207-a-release-is-files-of-one-commit.md)."""
