"""Calls the gRPC services of shard, coordinator and provider."""
