"""Sets up a process: clocks, logging, signals, garbage collection, the kernel cache."""
