"""Implements `bigfleet plan`: computes what BigFleet would do with a fleet and a demand from files.

`command` defines the flags, `inputs` and `patches` read files, `planning` decides, `tables` and `document` print the
plan.
"""
