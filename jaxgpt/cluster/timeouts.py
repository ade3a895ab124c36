"""Time limits for failure handling, in seconds. No other file defines any.

Users set four more in the configuration: `init_timeout`, `train.hang_timeout` and
`checkpoint.timeout_minutes`, which limit the start, each step and each save, and
`train.time_limit`.
"""

# Between two heartbeats of a process; a quarter of the hang timeout if that is shorter.
HEARTBEAT = 5.0
# For a host to acknowledge data. A restart of the network takes half of this.
LOST_HOST = 60.0
# For a running process to answer, a host to accept a connection, the kernel to end a process, a
# network file system to show a new file on other hosts, or a tracker to write its last records.
ANSWER = 10.0
# For the cause of a failure to be noticed before its consequences. When a process is killed, its
# connection closes at once, and the collectives of the others fail some milliseconds later.
SETTLE = 0.5
# Between the first and the last process to reach the rendezvous.
START_SKEW = 45.0
# For starting, restoring, compiling or saving, even if train.hang_timeout is shorter.
SLOW_PHASE = 1800.0
# For saving the last checkpoint before a scheduler ends the job. `stopping.margin` adapts it.
SAVE_MARGIN = 120.0
# Between two copies of one Ctrl-C. Both the terminal and the launcher may send it to a process.
DEBOUNCE = 2.0
# For a scheduler's command to answer, and for a launcher to exit after its processes.
COMMAND = 20.0
# For a host to load Python and JAX, or to write a run's last files, on a slow disk.
SLOW_DISK = 180.0
# Before the next attempt after one without a new checkpoint; doubled each time, up to 320 s.
RETRY = 10.0
# Between two wake-ups of the monitor's thread. A late one shows that the OS did not run it.
TICK = 0.04
