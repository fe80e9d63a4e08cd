"""The command line. Each command is a module of this package with a `COMMANDS` tuple."""
