"""What all tests share."""

import signal

# A shell's background job ignores SIGINT and hands that down to its children; with a handler here they get
# the default again, so that tests which press Ctrl-C mean the same everywhere.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
