"""Holds the backends that are shipped: simulated, partitioned, fake, fault, multiplex."""
