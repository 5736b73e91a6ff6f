"""`python -m backstamp`: the command, for environments whose scripts folder is not on the path."""

from backstamp.cli import main

main()
