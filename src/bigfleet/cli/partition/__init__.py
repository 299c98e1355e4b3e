"""Implements `bigfleet partition`: draws partitioned hosts and compares orders of placement."""
