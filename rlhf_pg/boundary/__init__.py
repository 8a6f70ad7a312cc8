"""Where the package meets what it does not control: users' code and text, launchers, terminals."""
