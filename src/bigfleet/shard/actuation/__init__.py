"""Carries actions out: queues them, drives providers and operators, retries and backs off."""
