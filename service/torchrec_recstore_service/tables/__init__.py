"""What is hosted by name, in one process or on a server: tables, their limits and saves."""
