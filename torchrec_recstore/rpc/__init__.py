"""How clients and parameter servers talk: the protocol, and one server's connection."""
