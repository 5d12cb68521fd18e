"""`python -m silotune`."""

from silotune.cli.main import main

main()
