"""Contact with the outside: users' code and text, servers, launchers, terminals."""
