"""Detection of concurrent writers to a file, through Linux file leases."""

import errno
import os
import signal
import sys
from pathlib import Path

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
            return True if error.errno == errno.EAGAIN and _is_local(descriptor) else None
        return False

    def _is_local(descriptor: int) -> bool:
        """True for a local file system; NFS and SMB refuse leases at will."""
        device = os.fstat(descriptor).st_dev
        if os.major(device):  # of a disk
            return True
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        number = f" 0:{os.minor(device)} "
        kinds = (line.partition(" - ")[2] for line in mounts.splitlines() if number in line)
        return any(kind.startswith(("tmpfs ", "overlay ")) for kind in kinds)

else:

    def open_for_writing(descriptor: int) -> bool | None:
        """Return None: this system does not tell."""
        return None
