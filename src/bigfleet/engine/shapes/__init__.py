"""Decides over demand shapes in plain Python: the readable statement of docs/spec/engine.md."""
