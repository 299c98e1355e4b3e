"""Defines limits that several packages check alike."""
