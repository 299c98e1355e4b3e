"""Implements everything that knows gRPC: messages, conversions, servers and clients."""
