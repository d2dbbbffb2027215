"""The commands of ``recstore`` and the functions that they share."""
