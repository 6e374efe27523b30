"""`python -m vlmpack` runs the `vlmpack` command, even if the package is not installed."""

from vlmpack.cli.app import main

main()
