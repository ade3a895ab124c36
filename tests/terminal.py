"""Running a command in a terminal of a given size."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from jobs import environment


def run_in_terminal(command, columns, rows, **extra):
    """What a command prints in a terminal, as text with all of its control characters."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # The readline of pytest exports the size of its own terminal, which would win over this one.
    variables = {k: v for k, v in environment(**extra).items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    said = bytearray()
    try:
        while part := os.read(ours, 2**16):
            said += part
    except OSError:
        pass  # the command has ended
    os.close(ours)
    assert process.wait() == 0, said.decode()
    return said.decode().replace("\r\n", "\n")
