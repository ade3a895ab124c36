"""Human-readable numbers."""

GIB = 2**30


def format_bytes(n: float) -> str:
    """Format a number of bytes with at most two decimals, such as "64 MiB" or "33.91 GiB"."""
    units = ["GiB", "MiB", "KiB", "B"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop()
    return f"{n:,.2f}".rstrip("0").rstrip(".") + f" {units[-1]}"


def count(n: int, noun: str, plural: str = "s") -> str:
    """Return a number and a noun, such as "1 step", or "2 processes" with `plural="es"`."""
    return f"{n} {noun}{plural if n != 1 else ''}"
