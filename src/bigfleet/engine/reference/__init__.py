"""Decides on aggregates in plain Python: the specification that the columnar engine must equal."""
