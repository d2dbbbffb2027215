"""The commands ``recstore serve`` and ``recstore servers``, and the process of a server."""
