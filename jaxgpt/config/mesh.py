"""Mesh axes, their roles, and mesh shapes.

Code looks up axes by role, not by name, so adding an axis takes one line in the `AXES` table.
"""

import math

from jaxgpt.config.errors import nearest

# Outermost axis first. Devices along the last axis are on the same host if possible.
AXES: dict[str, frozenset[str]] = {
    "stage": frozenset({"splits_layers"}),
    "data": frozenset({"splits_batch", "reduces_gradients"}),
    "fsdp": frozenset({"splits_batch", "reduces_gradients", "shards_parameters"}),
    "context": frozenset({"splits_sequence", "reduces_gradients"}),
    "tensor": frozenset({"splits_heads"}),
}
# The possible roles of an axis.
# splits_batch       devices along the axis process different rows
# splits_sequence    devices along the axis process different positions of the same rows
# splits_heads       heads, MLP and vocabulary are split, as in Megatron's tensor parallelism
# splits_layers      devices along the axis hold different layers
# shards_parameters  parameters, gradients and moments are sharded, depending on the ZeRO stage
# reduces_gradients  gradients are summed over the axis, because each device has a partial sum

SHORT_FORM = ("data", "fsdp", "tensor")  # the axes of `--mesh 2,1,4`; set other axes by name


def axes_with(*roles: str) -> tuple[str, ...]:
    """Return the names of the mesh axes with at least one of these roles, outermost first."""
    return tuple(axis for axis, own in AXES.items() if own.intersection(roles))


class MeshShape(dict[str, int]):
    """Dict that maps each mesh axis to its size; -1 is inferred from the number of devices.

    >>> MeshShape(2, 1, 4) == MeshShape(data=2, tensor=4) == MeshShape.parse("data=2,tensor=4")
    True
    """

    def __init__(self, *sizes: int, **by_name: int):
        """Set sizes by name, or up to three by position (see `SHORT_FORM`). Other sizes are 1."""
        given = dict(zip(SHORT_FORM, sizes, strict=False)) | by_name
        assert given.keys() <= AXES.keys(), given
        super().__init__((axis, given.get(axis, 1)) for axis in AXES)

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parse a shape, such as `2,1,4` or `data=2,tensor=4`.

        Raises `ValueError` if the text is malformed, an axis is unknown, or a size is less than 1
        (except a single -1).
        """
        parts = text.split(",")
        try:
            by_name = [part.split("=") for part in parts]
            pairs = by_name if "=" in text else zip(SHORT_FORM, parts, strict=True)
            sizes = {axis.strip(): int(size) for axis, size in pairs}
        except ValueError:
            sizes = {}
        counts = list(sizes.values())
        for axis in (name for name in sizes if name not in AXES):
            near = nearest(axis, AXES)
            hint = f"did you mean {near}?" if near else f"use one of {', '.join(AXES)}"
            raise ValueError(f"{axis!r} is not a mesh axis; {hint}")
        if len(sizes) != len(parts) or min(counts) < -1 or 0 in counts or counts.count(-1) > 1:
            raise ValueError(
                f"must be sizes {','.join(SHORT_FORM)}, such as 2,1,4, or sizes by name "
                f"({', '.join(AXES)}), such as data=2,tensor=4; each size must be at least 1, and "
                "at most one may be -1"
            )
        return cls(**sizes)

    def fill(self, n_devices: int) -> "MeshShape":
        """Return the shape for this number of devices, with -1 replaced by the inferred size.

        At most one size may be -1. Raises `ValueError` if the sizes do not fit the number of
        devices.
        """
        known = self.n_devices
        if self.is_filled and known != n_devices:
            raise ValueError(
                f"the product is {known} but the job has {n_devices} devices; set one size to -1 "
                "to infer it"
            )
        if n_devices % known:
            raise ValueError(
                f"{known} does not divide the job's {n_devices} devices; change the other sizes"
            )
        return MeshShape(**{k: n_devices // known if n == -1 else n for k, n in self.items()})

    @property
    def is_filled(self) -> bool:
        """True if no size is -1."""
        return -1 not in self.values()

    @property
    def n_devices(self) -> int:
        """The product of the sizes; -1 counts as 1."""
        return math.prod(max(1, n) for n in self.values())

    def split_of(self, *roles: str) -> int:
        """Return the product of the sizes of all axes with any of these roles; -1 counts as 1."""
        return math.prod(max(1, self[axis]) for axis in axes_with(*roles))

    @property
    def splits_only_batch(self) -> bool:
        """True for pure data parallelism: every axis except `data` has size 1 or -1.

        A single device counts as pure data parallelism.
        """
        shards = self.split_of("shards_parameters")
        return shards == 1 and self.n_devices == self.split_of("splits_batch")

    def describe(self) -> str:
        """Return the sizes by name, such as `data=2 fsdp=1 tensor=4`.

        Axes that are not in `SHORT_FORM` are omitted if their size is 1.
        """
        shown = {axis: n for axis, n in self.items() if n != 1 or axis in SHORT_FORM}
        return " ".join(f"{axis}={n}" for axis, n in shown.items())

    def __str__(self) -> str:
        """Return the shape in the format that `--mesh` accepts."""
        named = {axis: n for axis, n in self.items() if n != 1}
        if named.keys() <= set(SHORT_FORM):
            return ",".join(str(self[axis]) for axis in SHORT_FORM)
        return ",".join(f"{axis}={n}" for axis, n in named.items())
