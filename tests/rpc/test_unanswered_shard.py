"""A process that accepts connections and answers nothing, as one that was stopped by a signal."""

import socket

import pytest

from bigfleet.rpc.clients import shardread
from bigfleet.rpc.clients.shardread import ShardReader, UnreachableShard


def test_a_process_that_does_not_answer_in_time_is_not_called_one_without_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel accepts connections for a process that hangs."""
    monkeypatch.setattr(shardread, "CONNECT_SECONDS_MAX", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        reader = ShardReader(f"127.0.0.1:{hanging.getsockname()[1]}")

        with pytest.raises(UnreachableShard, match="does not answer in time: it may hang"):
            reader.connect()
