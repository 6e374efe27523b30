"""`python -m vlmpack` is the `vlmpack` command, also where the package is not installed."""

from vlmpack.cli.app import main

main()
