"""Copies of this Python on the disks of a job's hosts: `jaxgpt.launch --stage-env`.

A process that imports JAX opens some thousand files. A thousand processes, all at once, are more
than a shared file system is made for: so that each host reads one large file of it instead.
"""

import hashlib
import os
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.cluster.launchers import ProcessLayout, launch_command, place_on
from jaxgpt.config import UsageError

OF_THE_SYSTEM = ("/usr", "/usr/local")  # prefixes that hosts have on disks of their own
VERSION = "python{}.{}".format(*sys.version_info)
# conda's caches, and its other environments; Python's own tests, which are half of its files.
NOT_PACKED = ("base/pkgs", "base/envs", f"base/lib/{VERSION}/test")
SITES = ("site-packages", "dist-packages")
PRESETS = "configs"  # beside the package, in a checkout

# FOLDER ARCHIVE... -- COMMAND...: unpack each archive into FOLDER, unless it is there, and become
# COMMAND. In words of POSIX, for the host's own shell. A folder gets its name when it is complete.
UNPACK = r"""
root=$1
shift
fail() {
    echo "error: host $(uname -n): --stage-env=$root: $1; give a folder on a disk of the host's \
own, with room, that is yours" >&2
    exit 2
}
[ -d "$root" ] || said=$(mkdir -p "$root" 2>&1) || fail "$said"
while [ "$1" != -- ]; do
    folder=$root/$(basename "$1" .tar)
    if [ ! -d "$folder" ]; then
        (: >"$folder.lock") 2>/dev/null || fail "it cannot be written"
        exec 9>"$folder.lock"
        flock 9 # another job may have begun
        if [ ! -d "$folder" ]; then
            rm -rf "$folder.part"
            said=$(mkdir "$folder.part" && tar --no-same-owner -xf "$1" -C "$folder.part" 2>&1) || {
                rm -rf "$folder.part"
                fail "$1 cannot be unpacked ($(echo "$said" | tail -n 2 | head -n 1))"
            }
            if [ -d "$folder.part/base" ] && [ -d "$folder.part/env" ]; then
                sed -i "s|^home = .*|home = $folder/base/bin|" "$folder.part/env/pyvenv.cfg"
            fi
            mv "$folder.part" "$folder"
        fi
        exec 9>&-
    fi
    [ -O "$folder" ] || fail "another user made $folder"
    shift
done
shift
exec "$@"
"""


@dataclass(frozen=True)
class StagedPython:
    """This Python, with what it can import, as it is on every host once it was unpacked."""

    unpack: tuple[str, ...]  # words before a command, which do so if it was not done
    python: str
    path: tuple[str, ...]  # folders for PYTHONPATH


def pack(folder: str) -> StagedPython:
    """Pack this Python, unless that was done; `UsageError` if it cannot be.

    Two archives, named by what is in them: the environment, which is large and changes rarely, and
    packages outside of it: of editable installs, of PYTHONPATH, and those in this directory.
    """
    root = Path(folder).absolute()
    trees = _prefixes()
    folders = dict.fromkeys(Path(entry).resolve() for entry in sys.path if entry)
    sources = [f for f in folders if f.is_dir() and not _is_inside(f, trees)]
    members = [(name, f"{i}/{name.name}") for i, s in enumerate(sources) for name in _packages(s)]
    environment = _archive("env", _site_files(), trees)
    packages = _archive("src", _files(path for path, _ in members), members)
    given = [Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    of_the_system = [str(p) for p in given if p not in sources and not _is_inside(p, trees, ())]
    return StagedPython(
        unpack=("sh", "-c", UNPACK, "sh", str(root), str(environment), str(packages), "--"),
        python=str(root / environment.stem / trees[0][1] / "bin" / Path(sys.executable).name),
        path=(*(str(root / packages.stem / str(i)) for i in range(len(sources))), *of_the_system),
    )


def unpack(layout: ProcessLayout, staged: StagedPython, spares: bool) -> None:
    """Unpack on each host, and on spares; `UsageError` if one cannot, which has said why."""
    began = time.monotonic()
    hosts = [*layout.hosts, *(layout.spares if spares else ())]
    line = [*staged.unpack, "true"]
    if not layout.is_local:
        each = replace(place_on(layout, hosts), n_processes=len(hosts), per_host=1)
        line = [*launch_command(each, os.environ), *line]
    if subprocess.run(line, stdin=subprocess.DEVNULL).returncode:
        raise UsageError("--stage-env: not every host has a copy of this Python; see above")
    n = len(hosts)
    took = f"{time.monotonic() - began:.1f} s"
    _say(f"{staged.python} is on {n} host{'s' * (n > 1)}, checked in {took}")


def _prefixes() -> list[tuple[Path, str]]:
    """Return the folders of this Python, and their names in the archive."""
    prefix, base = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
    found = [(prefix, "env")] if prefix != base else []
    if str(base) not in OF_THE_SYSTEM:
        found.append((base, "base"))
    if not found:
        raise UsageError(
            f"--stage-env: {sys.executable} is the system's own Python, which hosts need no copy "
            "of; start from the virtual environment that has jaxgpt"
        )
    return found


def _is_inside(
    path: Path, trees: Iterable[tuple[Path, str]], others: Iterable[str] = OF_THE_SYSTEM
) -> bool:
    return any(path.is_relative_to(root) for root in (*(root for root, _ in trees), *others))


def _packages(folder: Path) -> Iterator[Path]:
    """Find what Python can import from a folder, which may hold much else, such as runs."""
    for path in sorted(folder.iterdir()):
        importable = path.suffix in (".py", ".so") or (path / "__init__.py").exists()
        if importable or folder.name in SITES:
            yield path
    if (folder / "jaxgpt").is_dir() and (folder / PRESETS).is_dir():
        yield folder / PRESETS


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Find all files that Python did not write itself."""
    for path in paths:
        yield path  # may be a file
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".pyc"))


def _site_files() -> Iterator[Path]:
    """Find what changes when something is installed."""
    for site in map(Path, sys.path):
        if site.name in SITES:
            yield from (site / name for name in sorted(os.listdir(site)) if name != "__pycache__")


def _archive(kind: str, signs: Iterable[Path], members: list[tuple[Path, str]]) -> Path:
    """Return the archive of `members` (path, name in it), packed unless there is one.

    The files that are its `signs` name it, by their sizes and times. It is beside the environment
    or, where that cannot be written, in this directory.
    """
    digest = hashlib.sha256(f"{sys.version} {sys.prefix} {sys.base_prefix}".encode())
    for path in signs:
        found = path.lstat()
        # A folder changes when Python writes its cache there; a .dist-info when pip replaces it.
        has_time = path.suffix == ".dist-info" or not stat.S_ISDIR(found.st_mode)
        state = (found.st_size, found.st_mtime_ns) if has_time else ""
        digest.update(f"\n{path} {state}".encode())
    beside = Path(sys.prefix).parent
    folder = beside if os.access(beside, os.W_OK) else Path.cwd()
    archive = folder / f"jaxgpt-{kind}-{digest.hexdigest()[:12]}.tar"
    if archive.exists():
        _say(f"{archive} is there")
        return archive
    began, part = time.monotonic(), archive.with_suffix(f".{os.getpid()}")
    try:
        _write(part, members)
        size = part.stat().st_size
        part.replace(archive)
    except OSError as error:
        raise UsageError(
            f"--stage-env: {archive} cannot be written ({error.strerror or error}); make room, or "
            "leave out --stage-env"
        ) from None
    finally:
        part.unlink(missing_ok=True)
    _say(f"packed {archive}, {size / 1e6:,.0f} MB, in {time.monotonic() - began:.1f} s")
    return archive


def _write(archive: Path, members: list[tuple[Path, str]]) -> None:
    left_out = list(NOT_PACKED)
    base = {name: path for path, name in members}.get("base")
    if base and str(base / f"lib/{VERSION}/site-packages") not in sys.path:
        left_out.append(f"base/lib/{VERSION}/site-packages")

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name in left_out:
            return None
        if member.issym() and os.path.isabs(member.linkname):
            for path, name in members:
                if Path(member.linkname).is_relative_to(path):
                    target = Path(name, Path(member.linkname).relative_to(path))
                    member.linkname = os.path.relpath(target, Path(member.name).parent)
        return member

    with tarfile.open(archive, "w") as tar:
        for path, name in members:
            tar.add(path, name, filter=keep)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
