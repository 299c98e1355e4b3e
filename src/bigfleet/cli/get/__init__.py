"""Implements `bigfleet get`: what a live shard knows, as tables, JSON or YAML.

`command` has the flags, `wanted` checks their values, `sources` asks the shard, `records` says what a JSON object
holds, `columns` what a table shows, `output` writes either and `watching` does it again and again.
"""
