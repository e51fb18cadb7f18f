"""Exceptions of the package beyond TypeError and ValueError, and what several errors advise."""

WITHOUT_MAILBOX = "leave mailbox out: the gather is then a collective of JAX."
"""The remedy where a mailbox cannot be had."""


class UnsupportedError(NotImplementedError):
    """The call is right but no kernel is shipped for it.

    The text names the GPU and what is shipped.
    """


class SetupError(RuntimeError):
    """Library, driver, cubin or an optional package cannot be used.

    The text says what was found, what is needed and what to do.
    """


class PeerTimeout(RuntimeError):
    """Another rank or process did not come in time.

    The text says which one and how long it was waited for.
    """
