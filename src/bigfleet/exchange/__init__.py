"""Proposes exchanges of a cluster's machines for cheaper ones. Pure; nothing here acquires or drains."""
