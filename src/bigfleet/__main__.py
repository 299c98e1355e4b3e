"""Runs the `bigfleet` command: `python -m bigfleet`."""

from bigfleet.cli.start import bigfleet

if __name__ == "__main__":
    bigfleet()
