"""Numbers formatted for people."""

GIB = 2**30


def format_bytes(n: float) -> str:
    """Format a number of bytes with at most two decimals: "64 MiB", "33.91 GiB", "12 B"."""
    units = ["GiB", "MiB", "KiB", "B"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop()
    return f"{n:,.2f}".rstrip("0").rstrip(".") + f" {units[-1]}"


def count(n: int, noun: str, plural: str = "s") -> str:
    """Return a number and its noun: "1 process", or "2 processes" if `plural` is "es"."""
    return f"{n} {noun}{plural if n != 1 else ''}"
