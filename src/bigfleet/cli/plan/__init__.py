"""Implements `bigfleet plan`: what BigFleet would do with a fleet and a demand from files.

`command` has the flags, `inputs` and `patches` read files, `planning` decides, `tables` and `document` show it.
"""
