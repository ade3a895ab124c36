"""Time limits for failure handling, in seconds. Define them only in this file.

Users can set four other limits: `init_timeout` (startup), `train.hang_timeout` (each step),
`checkpoint.timeout_minutes` (each save) and `train.time_limit` (the whole run).
"""

# Heartbeat interval. If a quarter of the hang timeout is shorter, that is used instead.
HEARTBEAT = 5.0
# Time limit for a host to acknowledge data: twice the duration of a network restart.
LOST_HOST = 60.0
# Time limit for a running process to answer, for a host to accept a connection, for the kernel to
# terminate a process, for a new file on a network file system to appear on other hosts, or for a
# tracker to write its last records.
ANSWER = 10.0
# Delay before reporting an error. If a lost process caused the error, the loss is detected during
# this delay. If a process is killed, its connection closes at once, but collectives on other
# processes fail milliseconds later.
SETTLE = 0.5
# Maximum delay between the arrivals of the first and the last process at the rendezvous.
START_SKEW = 45.0
# Minimum hang timeout while starting, restoring, compiling or saving.
SLOW_PHASE = 1800.0
# Time for saving the last checkpoint before a scheduler kills the job. `stopping.margin` adapts it.
SAVE_MARGIN = 120.0
# Maximum time between two SIGINTs from one Ctrl-C (from the terminal and the launcher).
DEBOUNCE = 2.0
# Time limit for a scheduler's command to answer, or for a launcher to exit once its processes have
# exited.
COMMAND = 20.0
# Time limit for a host with a slow disk to load Python and JAX, or to write a run's last files.
SLOW_DISK = 180.0
# Delay before the next attempt if the last one saved no new checkpoint. The delay doubles with each
# such attempt in a row, up to 320 s.
RETRY = 10.0
# Interval between wake-ups of the monitor's thread. A late wake-up means that the OS did not run
# the process.
TICK = 0.04
