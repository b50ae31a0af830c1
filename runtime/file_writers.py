"""Whether anybody has a file open for writing: what Linux knows, and tells by its leases."""

import errno
import signal
import sys

if sys.platform == "linux":
    import fcntl

    def open_for_writing(descriptor: int) -> bool | None:
        """Return whether a file is open for writing, or mapped for it; None if that is not told.

        A lease for reading is granted only if it is not. Linux grants one to the owner of the file
        and to root, on file systems of this machine.

        Args:
            descriptor: of the file, open for reading alone.
        """
        try:
            # Whoever opens the file before the lease is given back makes a signal, of which the
            # usual one would end this process.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return True if error.errno == errno.EAGAIN else None
        return False

else:

    def open_for_writing(descriptor: int) -> bool | None:
        """Return None: this system does not tell."""
        return None
