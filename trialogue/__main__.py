"""`python -m trialogue`."""

from trialogue.cli import main

main()
