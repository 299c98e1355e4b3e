"""The commands, and the place where clocks, sockets, files and randomness become real."""
