"""One file for each command of ``recstore``, and what they share."""
