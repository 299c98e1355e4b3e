"""Implements `bigfleet get`: prints what a live shard knows, as tables, JSON or YAML.

`command` defines the flags, `flag_values` checks their values, `sources` calls the shard, `records` defines the fields
of a JSON object, `columns` the columns of a table, `output` writes both, and `watching` repeats the query.
"""
