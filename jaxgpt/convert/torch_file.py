"""Files of torch.save, read without torch and without running anything that is in them.

Such a file is a zip archive: `data.pkl`, a pickle, and `data/0`, `data/1` ..., the tensors' bytes.
A pickle is a program for a small stack machine, one of whose instructions calls functions by name.
The machine below calls none: it builds containers, and tensors that stay in the file. A name that
it does not know ends the reading.
"""

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import UsageError
from jaxgpt.convert.tensors import FileTensor

STORAGES = {
    "FloatStorage": ("float32", 4), "HalfStorage": ("float16", 2), "DoubleStorage": ("float64", 8),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
}  # fmt: skip
MAX_BITS = 1024  # of a whole number
MAX_DIMS = 64  # NumPy's
_SCALARS = (str, bytes, int, float, bool, type(None))  # types of keys and of members of sets


class Global(NamedTuple):
    """The name of a class or function, which is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Inert:
    """An object of a class that is not known: its name, what it was made of, and its fields."""

    kind: Global
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


class Storage(NamedTuple):
    """The bytes of one or several tensors."""

    dtype: str
    itemsize: int
    offset: int  # in the file
    size: int  # elements


def load(path: Path, is_harmless: Callable[[Global], bool] = lambda _: False) -> Any:
    """Return the object of a torch.save, its tensors as `FileTensor`s.

    Args:
        is_harmless: whether an object of this name becomes an `Inert`, and not an error.

    Raises:
        UsageError: if the file is damaged, of a torch before 1.6, or names anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (pickle,) = (n for n in archive.namelist() if n.partition("/")[2] == "data.pkl")
            prefix = pickle.removesuffix("data.pkl")
            order = archive.NameToInfo.get(f"{prefix}byteorder")
            if order and (order.file_size != 6 or archive.read(order) != b"little"):
                raise UsageError(f"{path}: was written on a big-endian machine; save it again")
            members = {
                info.filename.removeprefix(f"{prefix}data/"): info
                for info in archive.infolist()
                if info.filename.startswith(f"{prefix}data/")
            }
            if archive.getinfo(pickle).compress_type != zipfile.ZIP_STORED:
                raise ValueError("its pickle is compressed")
            program = archive.read(pickle)
        return _Machine(path, members, is_harmless).run(program)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except zipfile.BadZipFile:
        raise UsageError(
            f"{path}: is no whole file of torch.save (no zip archive); copy it again, or, if a "
            "torch before 1.6 wrote it, load it with torch and save it again"
        ) from None
    except Exception as error:  # of pickletools, or of a program that makes no sense
        reason = " ".join(str(error).split())[:120]
        raise UsageError(f"{path}: is damaged ({reason}); copy it again") from None


class _Machine:
    """The stack machine of a pickle (Lib/pickletools.py describes every instruction)."""

    def __init__(self, path: Path, members: dict[str, Any], is_harmless: Callable[[Global], bool]):
        self.path, self.members, self.is_harmless = path, members, is_harmless
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each MARK
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """Return the object that a pickle describes."""
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _LITERALS:
                if type(argument) is int and argument.bit_length() > MAX_BITS:
                    raise ValueError(f"a number of {argument.bit_length()} bits in its pickle")
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name in _INSTRUCTIONS:
                _INSTRUCTIONS[opcode.name](self, argument)
            else:
                raise ValueError(f"instruction {opcode.name} of its pickle")
        raise ValueError("its pickle has no end")

    def refuse(self, name: Any) -> None:
        raise UsageError(
            f"{self.path}: its pickle names {name}, which is no tensor or container and could run "
            "code; nothing was run, and nothing of it is taken: save the weights alone"
        )

    def top(self) -> Any:
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        items = self.pop_mark()
        self.stack.append(kind(items))

    def mark(self, _: None) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop(self, _: None) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def put(self, at: int | None) -> None:
        self.memo[len(self.memo) if at is None else at] = self.top()

    def get(self, at: int) -> None:
        self.stack.append(self.memo[at])

    def tuple_of(self, n: int) -> None:
        self.stack[len(self.stack) - n :] = [tuple(self.stack[len(self.stack) - n :])]

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise ValueError("its pickle appends to what is no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, Inert):  # items of a dict of an unknown class
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            target[key] = value

    def add_members(self, _: None) -> None:
        for member in self.pop_mark():
            self.check_key(member)
            self.top().add(member)

    def check_key(self, key: Any) -> None:
        if not isinstance(key, _SCALARS):  # hashing nested tuples may take for ever
            raise ValueError(f"a key of its pickle is a {type(key).__name__}")

    def find(self, name: Global) -> None:
        is_storage = name.module == "torch" and name.name in STORAGES
        if name not in _CALLS and not is_storage and not self.is_harmless(name):
            self.refuse(name)
        self.stack.append(name)

    def find_text(self, text: str) -> None:
        self.find(Global(*text.split(" ", 1)))

    def find_top(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not type(name) is type(module) is str:  # no text is made of anything else: see `storage`
            raise ValueError("its pickle names what is no text")
        self.find(Global(module, name))

    def call(self, _: None) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global):
            self.refuse(f"a {type(function).__name__} as a function")
        if not isinstance(arguments, tuple):
            raise ValueError("its pickle calls without a tuple of arguments")
        known = _CALLS.get(function)
        made = known(self, *arguments) if known else Inert(function, arguments)
        self.stack.append(made)

    def call_with_names(self, _: None) -> None:
        self.stack.pop()
        self.call(None)

    def set_fields(self, _: None) -> None:
        state, target = self.stack.pop(), self.top()
        # An OrderedDict's fields are of no use: torch keeps versions of modules there.
        if isinstance(target, Inert) and isinstance(state, dict):
            target.fields.update(state)

    def ordered_dict(self, pairs: Any = ()) -> dict[Any, Any]:
        for key, _ in pairs:
            self.check_key(key)
        return dict(pairs)

    def set_of(self, members: Any = ()) -> set[Any]:
        for member in members:
            self.check_key(member)
        return set(members)

    def storage(self, _: None) -> None:
        kind, storage_type, key, _, size = self.stack.pop()
        # Nothing of a file is hashed or shown before its type is known: nested tuples that share
        # their parts are small, and their text is endless.
        if not (isinstance(storage_type, Global) and type(key) is str and type(size) is int):
            raise ValueError("its pickle refers to what is no storage")
        if kind != "storage" or storage_type.module != "torch":
            raise ValueError(f"its pickle refers to {storage_type}")
        dtype, itemsize = STORAGES[storage_type.name]
        info = self.members[key]
        if info.compress_type != zipfile.ZIP_STORED or size * itemsize != info.file_size:
            raise ValueError(f"data/{key} has {info.file_size} bytes, not {size * itemsize}")
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        if header[:4] != b"PK\x03\x04":
            raise ValueError(f"data/{key} is not where its list of files says")
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        self.stack.append(Storage(dtype, itemsize, info.header_offset + 30 + names, size))

    def tensor(
        self, storage: Storage, offset: int, shape: Any, strides: Any, *_: Any
    ) -> FileTensor:
        """Return what torch._utils._rebuild_tensor_v2 would."""
        numbers = [offset, *shape, *strides]
        if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(strides):
            raise ValueError("a tensor of which shape or strides are no numbers")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"a tensor of {len(shape)} dims")
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # A stride of 0 repeats elements: a small file would be more than the memory holds.
        if (0 not in shape and last >= storage.size) or math.prod(shape) > storage.size:
            raise ValueError(f"a tensor of shape {shape} in {storage.size} elements")
        where = storage.offset + offset * storage.itemsize
        return FileTensor(
            self.path, f"a tensor of shape {shape}", storage.dtype, tuple(shape), where,
            tuple(strides),
        )  # fmt: skip


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8".split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": lambda m, _: m.pop_mark(),
    "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": _Machine.get, "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
    "TUPLE": lambda m, _: m.push_marked(tuple),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.push_marked(list),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.update([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, _: m.update(m.pop_mark()),
    "ADDITEMS": _Machine.add_members,
    "GLOBAL": _Machine.find_text,
    "STACK_GLOBAL": _Machine.find_top,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_with_names,
    "BUILD": _Machine.set_fields,
    "BINPERSID": _Machine.storage,
}  # fmt: skip
# The functions that a pickle may call, and our replacements.
_CALLS: dict[Global, Callable[..., Any]] = {
    Global("collections", "OrderedDict"): _Machine.ordered_dict,
    Global("builtins", "set"): _Machine.set_of,
    Global("__builtin__", "set"): _Machine.set_of,
    Global("torch._utils", "_rebuild_tensor_v2"): _Machine.tensor,
    Global("torch._utils", "_rebuild_parameter"): lambda m, tensor, *_: tensor,
}
