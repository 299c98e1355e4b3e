"""Holds the programs that build parts of the project: generated code and the site of the documentation."""
