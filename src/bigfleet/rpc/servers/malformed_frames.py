"""Refuses sessions of peers that keep sending malformed frames.

docs/spec/shard.md §4.4. A malformed frame costs as much as a valid one. This module does not read a frame.
"""

#: Unreadable frames of one peer in so many seconds; after them its sessions are refused until these seconds are over.
MALFORMED_FRAMES_MAX = 3
MALFORMED_SECONDS = 60.0
#: Peers that are remembered; when there are more, the ones that began first are forgotten.
PEERS_MAX = 10_000


class MalformedFrames:
    """The unreadable frames of each peer in its present minute."""

    def __init__(self) -> None:
        #: Number of frames and end of the minute, by peer, in the order in which the minutes began.
        self._peers: dict[str, tuple[int, float]] = {}

    def add(self, peer: str, now_seconds: float) -> None:
        """Count an unreadable frame; a peer without a name is not counted."""
        if not peer:
            return
        count, end_seconds = self._peers.pop(peer, (0, 0.0))
        if end_seconds <= now_seconds:
            count, end_seconds = 0, now_seconds + MALFORMED_SECONDS
        if len(self._peers) >= PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        self._peers[peer] = (count + 1, end_seconds)

    def wait_seconds(self, peer: str, now_seconds: float) -> float:
        """Return for how long sessions of a peer are refused, 0 while they are not."""
        count, end_seconds = self._peers.get(peer, (0, 0.0))
        return max(0.0, end_seconds - now_seconds) if count >= MALFORMED_FRAMES_MAX else 0.0
