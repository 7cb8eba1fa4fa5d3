"""The command line: `main` finds the command, and each command has a file."""
