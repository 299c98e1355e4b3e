"""Implements `bigfleet snapshot`: saves the coordinator's tables, and restores a store from them."""
