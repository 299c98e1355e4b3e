"""Converts between values and protobuf messages."""
