"""Mesh axes and mesh shapes: the one table that knows which axes there are.

Code asks for the axes with a role, not for their names: a further axis is a line of the table.
"""

import math

# Outermost first: devices that are neighbours along the last axis share a host.
AXES: dict[str, frozenset[str]] = {
    "data": frozenset({"splits_batch", "reduces_gradients"}),
    "fsdp": frozenset({"splits_batch", "reduces_gradients", "shards_parameters"}),
    "tensor": frozenset({"splits_heads"}),
}
# The roles that an axis can have; no axis splits the sequence or the layers yet.
# splits_batch       devices along it process different rows
# splits_sequence    devices along it process different positions of the same rows
# splits_heads       heads, MLP and vocabulary are split over it (Megatron's tensor parallelism)
# splits_layers      the stack of layers is split over it
# shards_parameters  parameters, gradients and moments are sharded over it, as the ZeRO stage says
# reduces_gradients  each device along it finds a part of every gradient

SHORT_FORM = ("data", "fsdp", "tensor")  # the axes of `--mesh 2,1,4`; others are given by name


def axes_with(*roles: str) -> tuple[str, ...]:
    """Return the names of the mesh axes that have one of these roles, outermost first."""
    return tuple(axis for axis, own in AXES.items() if own.intersection(roles))


class MeshShape(dict[str, int]):
    """The size of every mesh axis by name; -1 is an axis that the number of devices fills.

    >>> MeshShape(2, 1, 4) == MeshShape(data=2, tensor=4) == MeshShape.parse("data=2,tensor=4")
    True
    """

    def __init__(self, *sizes: int, **by_name: int):
        """Take sizes in the order of the short form, or by name; others are 1."""
        given = dict(zip(SHORT_FORM, sizes, strict=False)) | by_name
        assert given.keys() <= AXES.keys(), given
        super().__init__((axis, given.get(axis, 1)) for axis in AXES)

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Read `2,1,4` or `data=2,tensor=4`; a `ValueError` says what a mesh looks like."""
        parts = text.split(",")
        try:
            by_name = [part.split("=") for part in parts]
            pairs = by_name if "=" in text else zip(SHORT_FORM, parts, strict=True)
            sizes = {axis.strip(): int(size) for axis, size in pairs}
        except ValueError:
            sizes = {}
        counts = list(sizes.values())
        well_formed = len(sizes) == len(parts) and sizes.keys() <= AXES.keys()
        if not well_formed or min(counts) < -1 or 0 in counts or counts.count(-1) > 1:
            raise ValueError(
                f"must be sizes {','.join(SHORT_FORM)}, such as 2,1,4, or sizes by name "
                f"({', '.join(AXES)}), such as data=2,tensor=4, each at least 1, and at most one "
                "of them -1"
            )
        return cls(**sizes)

    def fill(self, n_devices: int) -> "MeshShape":
        """Return the shape with this product, which decides a -1; `ValueError` if there is none."""
        known = self.n_devices
        if self.is_filled and known != n_devices:
            raise ValueError(
                f"the product is {known} but the job has {n_devices} devices (-1 fills one axis)"
            )
        if n_devices % known:
            raise ValueError(f"{known} does not divide the job's {n_devices} devices")
        return MeshShape(**{k: n_devices // known if n == -1 else n for k, n in self.items()})

    @property
    def is_filled(self) -> bool:
        """Whether no size is -1."""
        return -1 not in self.values()

    @property
    def n_devices(self) -> int:
        """The product of the sizes; one of -1 counts as 1."""
        return math.prod(max(1, n) for n in self.values())

    def split_of(self, *roles: str) -> int:
        """Return the number of devices along all axes with one of these roles; -1 counts as 1."""
        return math.prod(max(1, self[axis]) for axis in axes_with(*roles))

    @property
    def splits_only_batch(self) -> bool:
        """Whether each device holds all parameters and needs no other device for its rows."""
        shards = self.split_of("shards_parameters")
        return shards == 1 and self.n_devices == self.split_of("splits_batch")

    def __str__(self) -> str:
        """Return what `--mesh` takes."""
        named = {axis: n for axis, n in self.items() if n != 1}
        if named.keys() <= set(SHORT_FORM):
            return ",".join(str(self[axis]) for axis in SHORT_FORM)
        return ",".join(f"{axis}={n}" for axis, n in named.items())
