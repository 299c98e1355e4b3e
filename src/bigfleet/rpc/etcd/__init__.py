"""Stores the coordinator's tables in etcd."""
