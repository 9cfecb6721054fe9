"""`python -m stretto`: the same as the command `stretto`."""

from stretto.cli.main import main

main()
