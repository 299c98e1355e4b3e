"""Proposes exchanges of a cluster's machines for cheaper ones, and carries none out."""
