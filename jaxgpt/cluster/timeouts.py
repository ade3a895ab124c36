"""Time limits for failure handling, in seconds. No other file may define them.

The configuration has four more: `init_timeout` limits startup, `train.hang_timeout` each step,
`checkpoint.timeout_minutes` each save, and `train.time_limit` the whole run.
"""

# Interval between the heartbeats of a process, or a quarter of the hang timeout if that is shorter.
HEARTBEAT = 5.0
# Time limit for a host to acknowledge data. Restarting a network takes half as long.
LOST_HOST = 60.0
# Time limit for a running process to answer, a host to accept a connection, the kernel to terminate
# a process, a network file system to show a new file on other hosts, or a tracker to write its last
# records.
ANSWER = 10.0
# Delay that lets the cause of a failure be noticed before its consequences. When a process is
# killed, its connection closes at once, and collectives on other processes fail milliseconds later.
SETTLE = 0.5
# Largest allowed delay between the first and the last process to reach the rendezvous.
START_SKEW = 45.0
# Time limit for starting, restoring, compiling or saving, even if train.hang_timeout is shorter.
SLOW_PHASE = 1800.0
# Time for saving the last checkpoint before a scheduler kills the job. `stopping.margin` adapts it.
SAVE_MARGIN = 120.0
# Maximum time between two SIGINTs of one Ctrl-C; the terminal and the launcher may each send one.
DEBOUNCE = 2.0
# Time limit for a scheduler's command to answer, and for a launcher to exit after its processes.
COMMAND = 20.0
# Time limit for a host with a slow disk to load Python and JAX, or to write a run's last files.
SLOW_DISK = 180.0
# Wait after an attempt without a new checkpoint. It doubles with each such attempt, up to 320 s.
RETRY = 10.0
# Interval between wake-ups of the monitor's thread. If a wake-up is late, the OS did not run the
# process.
TICK = 0.04
