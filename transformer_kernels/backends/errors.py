"""The two ways in which a backend can decline a call."""


class BackendUnavailable(RuntimeError):
    """The backend cannot run here at all: not installed, not built, no device, or a device without a kernel image."""


class UnsupportedByBackend(NotImplementedError):
    """The backend runs here but does not support this call: its head dimension, dtype or mask."""
