"""A shell ignores SIGINT in what it starts in the background, and children inherit that: the Ctrl-C tests need it back."""

from __future__ import annotations

import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take any time for one example.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
