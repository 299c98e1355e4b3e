"""Defines the record that a provider keeps of each machine, and its transitions. Pure."""
