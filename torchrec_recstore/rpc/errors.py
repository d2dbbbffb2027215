from __future__ import annotations


class ServiceError(RuntimeError):
    """A parameter server cannot be reached, refuses access or has failed; the message names it, and the table."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the server's own error, where it has told one."""


class ServerRestartedError(ServiceError):
    """A server has restarted without what this client has written to it since its last save.

    Its tables are those of its last checkpoint. ``RecStoreClient.load``, or a new client, goes on from one.
    """


# Errors of a server that clients raise as what they are, by name.
REMOTE_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (ValueError, TypeError, MemoryError, FileExistsError, FileNotFoundError, OSError, ServerRestartedError)
}
