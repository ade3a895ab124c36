"""Conversion of other programs' command lines and shell scripts to jaxgpt commands.

Scripts are parsed but not run. Assignments, arrays and arithmetic are evaluated. Variables that a
script does not set are taken from the environment.
"""

import ast
import operator
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxgpt.cluster.hardware import VISIBLE_VARIABLES
from jaxgpt.config import UsageError, in_words, shorten, train_command

# Maps part of a program's name to the preset with that program's defaults, or to None if there is
# no such preset. A key that ends with .py is the whole name, or its end after an underscore.
PROGRAMS = {
    "wordplay": "wordplay",
    "pretrain_gpt": "megatron",
    "maxtext": "maxtext",
    "torchtitan": None,
    "run_train.sh": None,
    "train_lm": None,
    "jaxgpt.train": None,
    "train.py": "gpt2",  # nanoGPT
}
# Maps options of nanoGPT's sample.py to those of jaxgpt.sample.
SAMPLE = {
    "out_dir": "run", "start": "prompt", "num_samples": "num-samples",
    "max_new_tokens": "max-new-tokens", "temperature": "temperature", "top_k": "top-k",
    "seed": "seed",
}  # fmt: skip
# Defaults of sample.py that differ from those of jaxgpt.sample.
SAMPLE_DEFAULTS = {"out_dir": "out", "num_samples": "10", "max_new_tokens": "500"}
SAMPLE_IGNORED = ("device", "dtype", "compile", "init_from=resume")
# Launcher options for the number of processes, processes per host, and hosts.
TOTAL = {"-n", "-np", "--np", "--nproc", "--ntasks", "--num_processes", "--num-processes"}
PER_HOST = {
    "--nproc_per_node", "--nproc-per-node", "-ppn", "--ppn", "--ntasks-per-node",
    "--tasks-per-node", "-npernode", "--npernode", "-perhost", "--num_gpus",
}  # fmt: skip
HOSTS = {"--nnodes", "--nodes", "--num_nodes", "--num_machines", "--num-machines"}
MPI = {"mpiexec", "mpiexec.hydra", "mpiexec.openmpi", "mpirun", "orterun", "prun"}
N_IS_HOSTS = {"srun", "sbatch", "flux"}  # for other launchers, -N is the processes per host
TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
# Launchers that srun or mpiexec may start once on each host.
NESTED = {*TORCH, "accelerate", "deepspeed"}
ONE_PER_HOST = {"srun", "flux", *TORCH}
# Launchers, and options of others, that start processes on several hosts by default.
WHOLE_JOB = {"srun", *MPI}
HOST_FILES = {"--hostfile", "-hostfile", "--machinefile", "-machinefile", "-H"}
OWN_LAUNCHER = "jaxgpt.launch"
LAUNCHERS = {*MPI, *N_IS_HOSTS, *NESTED, "aprun", "launch", OWN_LAUNCHER}
PYTHON = {"-m", "-u"}  # Python's own options
# Programs that start a launcher or Python, and have options of their own.
WRAPPERS = {"numactl", "taskset", "env", "nice", "conda", "mamba", "micromamba"}
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
# Environment variables, and prefixes of variables, that choose devices or set JAX's options.
FOR_DEVICES = (*VISIBLE_VARIABLES, "JAX_", "XLA_")
TESTS = ("if ", "elif ", "case ", "while ", "for ", "[", "test ")
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?([-=?])([^${}]*))?\}|\$(\w+)")
_SCRIPT_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")  # $@ and ${@:2}
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_EXPORT = re.compile(r"(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*")
_BRANCH = re.compile(r"(?:(?:then|else|do|\{)\s+)+")
# Quoted text, ${NAME:-default}, arrays, arithmetic and command substitutions: these can contain
# spaces and operators. Nested parentheses are matched to a depth of three. A single quote that
# follows a letter quotes at most the rest of its line: it may be an apostrophe in a here-document.
_QUOTED = r"\\.|(?<!\w)'[^']*'|'[^'\n]*'|\"(?:\\.|[^\"\\])*+\""
_COMMENT = re.compile(rf"({_QUOTED})|(?:^|(?<=\s))#[^\n]*", re.DOTALL)
_INNER = rf"(?:{_QUOTED}|[^()])*+"
_INNER = rf"(?:{_QUOTED}|[^()]|\({_INNER}\))*+"
_INNER = rf"(?:{_QUOTED}|[^()]|\({_INNER}\))*+"
_GROUP = rf"{_QUOTED}|\$\{{[^{{}}]*\}}|(?<=[$=])\({_INNER}\)"
_STATEMENT = re.compile(rf"([;&|\n]*)((?:{_GROUP}|[^;&|\n])+)", re.DOTALL)
_WORD = re.compile(rf"(?:{_GROUP}|\S)+", re.DOTALL)


def command(words: list[str]) -> tuple[list[str], list[str]]:
    """Convert a shell script or a command line to a jaxgpt command.

    Returns the command (a list of one string) and the omitted arguments that would change the run.
    `words` holds a script's path, a command line as one string, or the words of a command line.
    Only the first call of a program in `PROGRAMS` is converted or, if there is none, the first call
    of nanoGPT's sample.py or of a prepare.py with an equivalent. Notes about changed, ignored or
    omitted arguments are printed to stderr.

    Raises:
        UsageError: if none of these programs is called, if only a prepare.py without an equivalent
            is called, if the script cannot be read, or if a number of processes or hosts has more
            than 18 digits.
    """
    shown, text = " ".join(words), shlex.join(words) if len(words) > 1 else "".join(words)
    if len(words) == 1 and os.path.isfile(text):  # a command line may be too long to be a path
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"convert: {shown}: not readable ({in_words(error)})") from None
    elif len(words) == 1 and text.endswith(".sh") and " " not in text and not _program([text]):
        raise UsageError(f"convert: {shown}: no such file; give a script or a command line")
    variables: dict[str, str] = {}
    conditions, tested, script, at = False, set(), [], 0
    for statement, is_conditional in _statements(text):
        if statement.startswith(TESTS):
            conditions = True  # -z is true if a variable is not set
            tested |= set(re.findall(r"-z\s+\"?\$\{?(\w+)", statement))
            continue
        if statement.startswith("echo "):
            continue
        if (found := _assignments(statement)) is not None:
            for name, plus, value in found:
                is_known = bool(variables.get(name) or os.environ.get(name))
                if not (is_known and (is_conditional or name in tested)):
                    _assign(variables, name, plus, value)
            continue
        raw = _split(_expand(statement, variables))
        parts = [part for word in raw for part in _parts(word, raw[0] == "eval")]
        if (found := _program(parts)) is not None:
            if conditions:
                remark = "conditions in the script are not evaluated: all branches were read"
                print(f"note: {remark}", file=sys.stderr)
            _note_device_variables(variables, parts)
            line, left_out = _convert(parts, *found)
            return [line], left_out
        if (i := _nanogpt_script(raw)) is not None and (
            not script or (_is_converted(raw[i]) and not _is_converted(script[at]))
        ):
            script, at = raw, i
    if script:
        _note_device_variables(variables, script)
        if script[at].endswith("prepare.py"):
            return [_prepare(script[at])], []
        line, left_out = _convert(script, at, None)
        return [line], left_out
    raise UsageError(
        f"convert: {shown or 'command'}: calls none of {', '.join(PROGRAMS)}; give a command line "
        "or a script that calls one of them directly"
    )


def _statements(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each statement of a script, and whether it follows `[ ... ] &&` or `[ ... ] ||`.

    Comments and the keywords `then`, `else` and `do` are left out.
    """
    text = _COMMENT.sub(lambda match: match[1] or "", text).replace("\\\n", " ")
    is_conditional = False
    for separator, statement in _STATEMENT.findall(text):
        statement = _BRANCH.sub("", statement.strip(), count=1)
        is_conditional = is_conditional and separator in ("&&", "||")
        yield statement, is_conditional
        is_conditional = is_conditional or statement.startswith(("[", "test "))


def _assignments(statement: str) -> list[tuple[str, str, str]] | None:
    """Return (name, "+" or "", value) for each assignment in a statement.

    Returns None if the statement is a command, such as `A=1 python train.py`.
    """
    words = _WORD.findall(_EXPORT.sub("", statement, count=1))
    matches = [_ASSIGNMENT.fullmatch(word) for word in words]
    if not all(matches) and not _EXPORT.match(statement):
        return None
    return [match.groups() for match in matches if match]


def _assign(variables: dict[str, str], name: str, plus: str, value: str) -> None:
    """Set a variable, or append to it if `plus` is not empty.

    If `value` is neither an array nor arithmetic but has several unquoted words, it is usually a
    command substitution, such as `$(wc -l hosts)`. The variable is then left unchanged, because the
    command's output is unknown.
    """
    if not value.startswith(("(", "$((")) and len(_split(value)) > 1:
        return
    inner = value[1:].removesuffix(")") if value.startswith("(") else value
    value = " ".join(_split(_expand(inner, variables)))
    variables[name] = f"{variables.get(name, '')} {value}" if plus else value


def _parts(word: str, is_evaluated: bool) -> list[str]:
    """Split a word into shell words if it is an option or follows `eval`."""
    return _split(word) if word.startswith("-") or is_evaluated else [word]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unterminated quote
        return text.split()


def _expand(text: str, variables: dict[str, str]) -> str:
    """Expand variables and arithmetic. Unknown variables are left unexpanded."""

    def value(match: re.Match) -> str:
        name, default = match[1] or match[4], match[3]
        known = variables.get(name, os.environ.get(name, ""))
        if known:  # do not expand variables in the value, such as $PATH in PATH=/bin:$PATH
            return known.replace("$", "\0")
        return default if match[2] in ("-", "=") else f"\0{match[0][1:]}"

    previous = None
    while previous != text:  # default values may contain variables
        previous, text = text, _VARIABLE.sub(value, text)

    def calculated(match: re.Match) -> str:  # names do not need a $ in arithmetic
        names = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        return _calculate(names, match[0])

    text = re.sub(r"\$\(\(([^$\0]*?)\)\)", calculated, text)
    return text.replace("\0", "$")


def _calculate(text: str, unknown: str) -> str:
    """Return the value of an integer expression, or `unknown` if it cannot be evaluated."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(node.value)

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (
        SyntaxError, AttributeError, KeyError, TypeError, ValueError, ArithmeticError,
        RecursionError,
    ):  # fmt: skip
        return unknown


def _program(parts: list[str]) -> tuple[int, str | None] | None:
    """Return the index of the program's name in a command, and the program's preset.

    Returns None if the command calls no program in `PROGRAMS`.
    """
    for i, word in enumerate(parts):
        is_wordplay = any(re.match(r"(\+?experiment|data)=", other) for other in parts[i:])
        if word.rpartition("/")[2] == "__main__.py" and is_wordplay:
            return i, "wordplay"
        is_module = i > 0 and parts[i - 1] == "-m"
        if is_module or word.endswith((".py", "run_train.sh")):
            name = (word if is_module else word.rpartition("/")[2]).lower()
            for part, preset in PROGRAMS.items():
                if name == part if part.endswith(".py") else part in name:
                    return i, preset
    return None


def _nanogpt_script(parts: list[str]) -> int | None:
    """Return the index of nanoGPT's sample.py or prepare.py in a command, or None."""
    names = [word.rpartition("/")[2] for word in parts]
    return next((i for i, name in enumerate(names) if name in ("sample.py", "prepare.py")), None)


def _is_converted(path: str) -> bool:
    """Return whether jaxgpt has an equivalent of a script that `_nanogpt_script` finds."""
    return path.endswith("sample.py") or Path(path).parent.name == "shakespeare_char"


def _sample(arguments: list[str]) -> tuple[str, list[str], list[str]]:
    """Convert the arguments of nanoGPT's sample.py.

    Returns the jaxgpt.sample command, a list of remarks, and the omitted arguments.
    """
    given, remarks, left_out = dict(SAMPLE_DEFAULTS), [], []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if equals and name in SAMPLE:
            given[name] = value
        elif equals and name == "init_from" and value.startswith("gpt2"):
            left_out.append(argument)
            remarks.append(f"{argument}: download the model, and use --run hf:FOLDER")
        elif not {name, f"{name}={value}"} & {*SAMPLE_IGNORED}:
            left_out.append(argument)
    options = []
    for name, value in given.items():
        word = _quote(value)
        if "$" in value and word == value:  # a prompt in a variable may contain spaces
            word = f'"{value}"'
        options.append(f"--{SAMPLE[name]} {word}")
    return " ".join(["python -m jaxgpt.sample", *options]), remarks, left_out


def _prepare(path: str) -> str:
    """Return the jaxgpt command for one of nanoGPT's data/NAME/prepare.py.

    Raises `UsageError` if NAME is not a dataset that jaxgpt.prepare downloads.
    """
    if not _is_converted(path):
        name = Path(path).parent.name
        raise UsageError(
            f"convert: {path}: use python -m jaxgpt.prepare text --input FILES --tokenizer FOLDER "
            f"--name {name or 'NAME'}, where FOLDER holds the tokenizer, or python -m "
            "jaxgpt.prepare shakespeare_char"
        )
    return "python -m jaxgpt.prepare shakespeare_char"


def _convert(parts: list[str], index: int, preset: str | None) -> tuple[str, list[str]]:
    """Convert the words of a call of another program or of sample.py, and print notes.

    Returns the jaxgpt command and the omitted arguments.
    """
    launcher = [part for word in parts[:index] for part in _split_number(word)]
    arguments = _arguments(parts[index + 1 :])
    for word in launcher:  # MODULE=llama3 CONFIG=llama3_8b ./run_train.sh
        if word.startswith(("CONFIG=", "CONFIG_FILE=")) and "run_train.sh" in parts[index]:
            arguments = ["--config", word.partition("=")[2], *arguments]
    prefix, n_devices = _launcher(launcher)
    if Path(parts[index]).name == "sample.py":
        line, remarks, left_out = _sample(arguments)
    else:
        line, remarks, left_out = train_command(arguments, preset, _quote, n_devices)
    if OWN_LAUNCHER in launcher:
        prefix = _own_launcher(parts[:index])
        launcher = launcher[: launcher.index(OWN_LAUNCHER)]
    if options := _other_options(launcher):
        remarks.append(
            "launcher options left out, because jaxgpt.launch chooses hosts and CPU binding: "
            + ", ".join(options)
        )
    if left_out:
        remarks.append(f"left out: {', '.join(left_out)}")
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)
    given = " ".join([prefix, *arguments, line])  # all may contain variables
    if unset := sorted(set(re.findall(r"\$\{?(\w+)", given))):
        print(
            f"note: not set in the script: {', '.join(f'${name}' for name in unset)}",
            file=sys.stderr,
        )
    return f"{prefix}{line}", left_out


def _arguments(words: list[str]) -> list[str]:
    """Return a program's arguments without redirections and without those of the script."""
    ends = [i for i, word in enumerate(words) if re.match(r"[|;&>]|\d>", word)]
    words = words[: min(ends, default=None)]
    return [word for word in words if not _SCRIPT_ARGUMENTS.fullmatch(word)]


def _note_device_variables(variables: Mapping[str, str], words: list[str]) -> None:
    """Print a note that lists the variables that the new command needs to use the same devices.

    `variables` are set earlier in the script. `words` are those of the call, which may set others.
    """
    own = [match for match in map(_ASSIGNMENT.fullmatch, words) if match]
    values = {**variables, **{match[1]: match[3] for match in own}}
    needed = [name for name in values if name.startswith(FOR_DEVICES)]
    if needed:
        settings = " ".join(f"{name}={_quote(values[name])}" for name in needed)
        print(f"note: set {settings} before the new command, too", file=sys.stderr)


def _quote(word: str) -> str:
    """Quote a word for the shell, but leave variables unquoted."""
    return word if re.fullmatch(r"[\w@%+=:,./${}-]+", word) else shlex.quote(word)


def _split_number(word: str) -> list[str]:
    """Split an option such as `-n8` into `-n` and `8`. Other words are not split."""
    match = re.fullmatch(r"(-[nN])([\d$].*)", word)
    return [*match.groups()] if match else [word]


def _with_owners(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each word, after the kind of program that its options belong to.

    The kind is `launcher`, `wrapper` or `python`, or empty if the word is the program itself. Words
    before the first program count as a launcher's.
    """
    kind = "launcher"
    for word in words:
        name = word.rpartition("/")[2]
        if name in LAUNCHERS:
            program = "launcher"
        elif name in WRAPPERS:
            program = "wrapper"
        else:
            program = "python" if _PYTHON.fullmatch(word) else ""
        kind = program or kind
        yield "" if program else kind, word


def _other_options(words: list[str]) -> list[str]:
    """Return the launcher options that `_launcher` does not use, with their values."""
    of_launcher = TOTAL | PER_HOST | HOSTS | PYTHON | {"-N"}  # torchrun -m MODULE
    used = {"launcher": of_launcher, "wrapper": set(), "python": PYTHON}
    options: list[str] = []
    takes_value = False
    for kind, word in _with_owners(words):
        name, equals, _ = word.partition("=")
        if kind and re.match(r"--?\w", word):
            is_other = name not in used[kind]
            options += [word] if is_other else []
            takes_value = is_other and not equals
        else:
            if kind and takes_value:
                options[-1] += f" {word}"
            takes_value = False
    return options


def _own_launcher(words: list[str]) -> str:
    """Return a call of jaxgpt.launch, with its options, up to the Python that it starts."""
    start = words.index(OWN_LAUNCHER)
    is_end = [word[:1] == "$" or word in NESTED or _PYTHON.fullmatch(word) for word in words]
    ends = [i for i in range(start + 1, len(words)) if is_end[i]]
    return " ".join(["python -m", *map(_quote, words[start : min(ends, default=None)]), ""])


def _launcher(words: list[str]) -> tuple[str, int | None]:
    """Return the jaxgpt.launch prefix that replaces a launcher, and the number of processes.

    The prefix is an empty string for a single process, and for jaxgpt.launch itself. The number is
    None if it is not given. If the number cannot be known, a note is printed, and the prefix has no
    `-n`, so that jaxgpt.launch uses all hosts of the job. No note is printed if the launcher itself
    uses all hosts and only the number of processes per host is given.
    """
    nested = max((i for i, word in enumerate(words) if word in NESTED), default=0)
    if HOSTS & {word.split("=")[0] for word in words[nested:]}:
        words = words[nested:]  # srun or mpiexec only starts this launcher on each host
    programs = {word.rpartition("/")[2] for word in words}
    host_names, per_host_names = HOSTS, PER_HOST | {"-N"}
    if programs & N_IS_HOSTS:
        host_names, per_host_names = HOSTS | {"-N"}, PER_HOST
    pairs = [word.split("=", 1) for word in words if re.match(r"-.*=", word)]
    for (kind, word), value in zip(_with_owners(words), words[1:], strict=False):
        if kind == "launcher" or word not in ("-n", "-N"):  # wrappers have their own -n and -N
            pairs.append([word, value])
    numbers, unknown = {}, {}
    for name, value in pairs:
        if name not in TOTAL | host_names | per_host_names or value.startswith("-"):
            continue
        if not value.isdecimal():
            unknown[name] = f"{name} {value}"
        elif len(value) > 18:  # by default, int() rejects thousands of digits
            raise UsageError(
                f"convert: {name} {shorten(value)}: must be a whole number, less than 10^18"
            )
        else:
            numbers[name] = int(value)

    def find(names: set[str]) -> int | None:
        return next((numbers[name] for name in numbers if name in names), None)

    total, per_host, hosts = find(TOTAL), find(per_host_names), find(host_names)
    if OWN_LAUNCHER in words:
        return "", total
    given = numbers.keys() | unknown.keys()
    if programs & ONE_PER_HOST and given & host_names and given <= host_names:
        per_host = 1
    # On a single host, one process can use all devices.
    needed = TOTAL | host_names if hosts in (None, 1) else TOTAL | host_names | per_host_names
    reasons = [unknown[name] for name in unknown if name in needed]
    if hosts not in (None, 1) and not per_host and not reasons:
        reasons = ["processes per host"]
    uses_all_hosts = hosts is None and (
        programs & WHOLE_JOB or any(word.split("=")[0] in HOST_FILES for word in words)
    )
    if uses_all_hosts and not per_host and not reasons:
        reasons = ["number of processes"]
    # wordplay's course starts commands with `launch`, which uses all devices of the job.
    is_whole_job = "launch" in words and "accelerate" not in words
    if total is None and (is_whole_job or (uses_all_hosts and per_host and not reasons)):
        number = ""
    elif total is None and reasons:
        print(
            f"note: {', '.join(reasons)}: the value is not known before the job starts, so "
            "jaxgpt.launch starts processes on all hosts of the job",
            file=sys.stderr,
        )
        number = ""
    else:
        if total is None and per_host:
            total = per_host * (hosts or 1)
        if total in (None, 1):
            return "", total
        number = f" -n {total}"
        per_host = per_host or (total // hosts if hosts else None)
    return f"python -m jaxgpt.launch{number}{f' -ppn {per_host}' if per_host else ''} -- ", total
