"""`python -m trialogue`."""

from trialogue.cli.main import main

main()
