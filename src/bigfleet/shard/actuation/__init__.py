"""Executes actions: queues them, calls providers and operators, retries and backs off."""
