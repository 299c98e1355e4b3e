"""Protobuf messages, conversions, gRPC servers and clients."""
