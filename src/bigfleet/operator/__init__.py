"""Runs inside one cluster: adds up its demand, holds the session with its shard, drains nodes on request.

It opens every connection itself and decides nothing about machines; without it the cluster keeps what it has.
"""
