"""Contact with what the package does not control: users' code and text, launchers, terminals."""
