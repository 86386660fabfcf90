"""`python -m outrider`."""

from outrider.cli import main

main()
