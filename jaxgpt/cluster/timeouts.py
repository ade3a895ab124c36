"""The time limits of failure handling, in seconds. No other file defines one.

Users set four more in the configuration: `init_timeout`, `train.hang_timeout` and
`checkpoint.timeout_minutes`, which bound the start, each step and each save, and
`train.time_limit`.
"""

# How often each process tells process 0 where it is, or four times per hang timeout if that is
# less.
HEARTBEAT = 5.0
# For a host to acknowledge what it is sent. Networks that restart take half of this.
LOST_HOST = 60.0
# For a running process to answer, a host to accept a connection, the kernel to end a process, a
# network file system to show a new file to other hosts, a tracker to write its last records.
ANSWER = 10.0
# For the cause of a failure to be seen before its consequences: when a process is killed, its
# connection closes at once, and the collectives of the others fail some milliseconds later.
SETTLE = 0.5
# Between the first and the last process of a job that reaches the rendezvous.
START_SKEW = 45.0
# For starting, restoring, compiling or saving, even where train.hang_timeout is less.
SLOW_PHASE = 1800.0
# For saving the last checkpoint before a scheduler ends the job, until a save has been timed.
SAVE_MARGIN = 120.0
# Between two copies of one Ctrl-C: the terminal sends it to all processes, and so do launchers.
DEBOUNCE = 2.0
# For a scheduler's command to answer, and a launcher to end after its processes.
COMMAND = 20.0
# For a host that reads Python and JAX, or writes a run's last files, from or to a slow disk.
SLOW_DISK = 180.0
# Before the next try after one that made no progress; doubled each time.
RETRY = 10.0
# Between two looks at the clock, which show that this process was not run in between.
TICK = 0.04
