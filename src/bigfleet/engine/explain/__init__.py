"""Explains decisions: listens to the reference engine and puts its records into sentences."""
