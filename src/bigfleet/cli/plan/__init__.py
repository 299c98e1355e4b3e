"""`bigfleet plan`: what BigFleet would do with a fleet and a demand given as files, without touching anything.

`command` has the flags, `inputs` and `patches` read files, `planning` decides, `tables` and `document` show it.
"""
