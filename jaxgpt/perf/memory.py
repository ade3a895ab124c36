"""Memory in use, of devices or of the process."""

import os
import resource

import jax


def memory_in_use() -> tuple[int, int] | None:
    """Return bytes in use and their peak: of the fullest local device, or the RSS on CPUs.

    None where the devices keep no account.
    """
    if jax.default_backend() == "cpu":
        try:
            with open("/proc/self/statm") as file:
                now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # not Linux
            return None
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return now, max(now, peak)  # the kernel adds up the two at different times
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if not all("bytes_in_use" in one and "peak_bytes_in_use" in one for one in stats):
        return None
    return max(s["bytes_in_use"] for s in stats), max(s["peak_bytes_in_use"] for s in stats)
