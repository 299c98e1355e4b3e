"""Frees the frames of a call that a handler aborted, without a garbage collection.

gRPC keeps the exception of an aborted call in the state of the call, which the handler's frames refer to: request,
context and exception would hold each other until a collection. Processes here collect rarely
(docs/adr/0115-rare-collections-and-short-turns.md).
"""


def release_frames(error: BaseException) -> None:
    """Drop the traceback of an exception and of those that it was raised from; the status of the call stays."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained.__cause__, chained.__context__, chained = None, None, chained.__cause__ or chained.__context__
