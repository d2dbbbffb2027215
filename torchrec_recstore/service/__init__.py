"""Tables for clients: in their own process, or on parameter servers."""
