"""Translation of command lines into strings for each setting."""

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from jaxgpt.config import aliases
from jaxgpt.config.command_line import CommandLine, Default
from jaxgpt.config.errors import nearest
from jaxgpt.config.other_programs import finish, put_all
from jaxgpt.config.schema import settings
from jaxgpt.config.values import describe, takes_many

_IN_RUNS = ("config.yaml", "metrics.jsonl", "checkpoints")  # at least one is in a run directory
_ON, _OFF = {"", "1", "true"}, {"0", "false"}  # values of other programs' flags


def translate(
    argv: Sequence[str],
    presets: Mapping[str, Path],
    guesses: bool = True,
    n_devices: int | None = None,
    preset: str | None = None,
) -> CommandLine:
    """Return the settings that a command line describes.

    Arguments that cannot be translated do not raise an error. The result's `problems` and `notes`
    explain them. The values of settings are not checked. If `argv` refers to a DeepSpeed
    configuration, that file is read.

    Args:
        argv: The arguments, which may be flags of other programs.
        presets: Maps preset names to files.
        guesses: Replace an unknown key with its probable meaning. If False, replace only misspelled
            keys, and leave out other unknown keys.
        n_devices: The number of devices, or None if it is unknown.
        preset: The preset with the defaults of the program, if the program is known.
    """
    line, ignored = CommandLine(default=Default(preset or "tiny")), []
    for argument, shown, key, values in _arguments(argv, presets, line):
        value = " ".join(values)
        if not _is_known(key) and (meant := _meant_by(key, guesses)):
            line.problems.append(unknown_key(shown, key))
            line.corrected.append(argument)
            key = meant
            if settings().get(_setting(key)) is bool and not values:
                values = ["True"]
        name = _setting(key)
        text = "" if name else aliases.find_end(aliases.SETTINGS, key)
        neutral = aliases.NEUTRAL.get(key, "") if name else aliases.find_end(aliases.NEUTRAL, key)
        is_switch = bool(text) and "{}" not in text
        is_off = is_switch and value.lower() in _OFF
        if value == "null" and type(None) in get_args(settings().get(key)):  # Hydra's None
            line.put(key, ["None"], argument)
        elif value in neutral.split() or value == "null" or is_off:
            ignored.append(argument)
        elif (name or "{}" in text) and not values:
            line.leave_out(argument, f"{argument}: needs a value")
        elif name:
            line.put(name, values, argument)
        elif is_switch and value.lower() not in _ON:
            line.leave_out(argument, f"{argument}: must be True or False")
        elif text:
            put_all(line, text, values, argument)
        elif aliases.known_end(key, aliases.IGNORED):
            reason = aliases.find_end(aliases.KEY_SUGGESTIONS, key)
            line.notes += [f"{argument}: ignored; {reason}"] if reason else []
            ignored += [] if reason else [argument]
        elif fix := aliases.find_end(aliases.KEY_FIXES, key):
            line.problems.append(f"{unknown_key(shown, key)} (the new command has {fix})")
            put_all(line, fix, values, argument)
        else:
            line.leave_out(argument, unknown_key(shown, key))
    if ignored:
        line.notes.append(f"ignored (no effect here): {', '.join(ignored)}")
    finish(line, presets, n_devices)
    return line


def unknown_key(shown: str, key: str | None = None) -> str:
    """Return an error message for an unknown key, with a suggestion.

    `shown` is the key as typed. `key` is the key to look up, with underscores and no leading
    dashes. It defaults to `shown`.
    """
    key = key or shown
    lasts = {name.rpartition(".")[2] for name in settings()}
    found = aliases.find_end(aliases.KEY_SUGGESTIONS, key)
    if found and not ("." in key and key.rpartition(".")[2] in lasts):
        return f"{shown}: not a setting of jaxgpt; {found}"
    if meant := _guess_key(key) or _near_flag(key):
        name = "mesh" if meant == "parallel.mesh" else meant
        hint = f"did you mean {name if '.' in name else '--' + name.replace('_', '-')}?"
    else:
        hint = "python -m jaxgpt.train --help lists every key"
    return f"{shown}: unknown key; {hint}"


def _setting(key: str) -> str | None:
    """Return the setting that a key or another program's name for it stands for, or None."""
    return key if key in settings() else aliases.KEY_ALIASES.get(key)


def _is_known(key: str) -> bool:
    """Return whether a key is either a setting or a flag that one of the tables lists."""
    tables = (aliases.SETTINGS, aliases.NEUTRAL, aliases.IGNORED, aliases.KEY_SUGGESTIONS)
    return bool(_setting(key) or any(aliases.known_end(key, table) for table in tables))


def _meant_by(key: str, guesses: bool) -> str | None:
    """Return the key or flag that an unknown key probably means, or None.

    If `guesses` is False, accept only misspelled keys, because other programs have flags with
    similar names and different meanings, such as rope_min_timescale and rope_max_timescale.
    """
    meant = _guess_key(key) or _near_flag(key)
    return meant if meant and (guesses or _is_slip(key, meant)) else None


def _is_slip(key: str, meant: str) -> bool:
    """Return whether two keys differ only in the spelling or the order of their words."""
    if "." not in key:
        meant = meant.rpartition(".")[2]
    words, others = re.split("[._]", key), re.split("[._]", meant)
    is_close = len(words) == len(others) and all(
        nearest(word, [other], 0.75) for word, other in zip(words, others, strict=True)
    )
    is_same = "".join(words) == "".join(others) or sorted(words) == sorted(others)
    return key != meant and (is_close or is_same)


def _near_flag(key: str) -> str | None:
    """Return the flag of another program that an unknown key probably means, or None."""
    flags = sorted({*aliases.KEY_ALIASES, *aliases.SETTINGS, *aliases.NEUTRAL, *aliases.IGNORED})
    if key in flags:
        return None
    swapped = [flag for flag in flags if sorted(flag.split("_")) == sorted(key.split("_"))]
    return swapped[0] if swapped else nearest(key, flags, 0.88)


def _guess_key(key: str) -> str | None:
    """Return the setting that an unknown key probably means, or None.

    Keys in other sections must match more closely, because other programs have flags with similar
    names and different meanings. For example, exit_interval is not a typo of eval_interval.
    """
    section, _, last = key.rpartition(".")
    lasts = {name.rpartition(".")[2]: name for name in settings()}
    in_section = [name for name in settings() if name.rpartition(".")[0] == section]
    own = {name.rpartition(".")[2]: name for name in in_section}
    if not section:
        own["mesh"] = "parallel.mesh"  # parallel.mesh is usually set with --mesh
    near = [
        lasts.get(last) or aliases.KEY_ALIASES.get(last),
        *(own[close] for close in difflib.get_close_matches(last, own, 1, 0.75)),
        *(lasts[close] for close in difflib.get_close_matches(last, lasts, 1, 0.9)),
    ]
    return next((name for name in near if name), None)


def _arguments(
    argv: Sequence[str], presets: Mapping[str, Path], line: CommandLine
) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (argument as typed, key as typed, key, values) for each argument.

    Malformed arguments are not yielded, but added to `line.problems`.
    """
    words, seen = list(argv), set()
    while words:
        word = words.pop(0)
        shown, equals, value = word.partition("=")
        # A dash pasted from formatted text may be U+2013 or U+2014.
        key = re.sub(r"^(--?|\+{1,2}|[\u2013\u2014])", "", shown).replace("-", "_")
        if not equals and _is_base_of_maxtext(word):
            line.other.later["maxtext"] = []
            continue
        if word.endswith((".py", ".toml", ".yml", ".yaml")) and not equals:
            yield word, word, "config", [word]
            continue
        name = _setting(key)
        if not key or not (word.startswith("--") or equals):
            _explain_word(word, name, words, presets, line)
            continue
        is_switch = not name and _is_switch(key)
        several = not is_switch and (not name or takes_many(settings()[name]))
        values, is_flag = [value] if equals else [], not name or settings()[name] is bool
        next_setting = r"--|[+\w.-]+=" if several or is_flag else "--"
        while words and (not values or several) and not re.match(next_setting, words[0]):
            if equals and not name or is_switch and words[0].lower() not in _ON | _OFF:
                break
            values.append(words.pop(0))
        argument = word if equals else " ".join([word, *values])
        if name and key in seen and several:
            line.leave_out(argument, f"{word}: given twice; put all values after a single --{name}")
        elif name and not values and settings()[name] is bool:
            yield argument, shown, key, ["True"]
        elif name and not values:
            line.leave_out(argument, f"--{name}: needs a value, {describe(settings()[name])}")
        else:
            yield argument, shown, key, values
        seen.add(key)


def _is_base_of_maxtext(word: str) -> bool:
    """Return whether an argument is the path of MaxText's base.yml, which holds its defaults."""
    path = Path(word)
    return path.name == "base.yml" and ("maxtext" in word.lower() or not os.path.isfile(path))


def _is_switch(key: str) -> bool:
    """Return whether a flag of another program takes no value other than True or False."""
    text = aliases.find_end(aliases.SETTINGS, key) or aliases.find_end(aliases.KEY_FIXES, key)
    return bool(text) and "{}" not in text


def _explain_word(
    word: str, key: str | None, following: list[str], presets: Mapping[str, Path], line: CommandLine
) -> None:
    """Add a problem to `line` for a word that is not an argument.

    If the first words in `following` seem to be the word's value, they are removed. `key` is the
    setting that `word` names, if any.
    """
    n_words = 2 if following[:1] == ["="] else 1  # key = value
    values = following[n_words - 1 : n_words]
    if word in presets:
        key, values, n_words = "config", [word], 0
    if key and values and not re.match(r"--|.+=", values[0]):
        meant = f"--{'mesh' if key == 'parallel.mesh' else key} {values[0]}"
        typed = " ".join([word, *following[:n_words]])
        line.problems.append(f"{typed}: did you mean {meant}?")
        line.corrected.append(typed)
        line.put(key, values, meant)
        del following[:n_words]
    elif word.endswith((".sh", ".pbs", ".slurm", ".sbatch")):
        line.leave_out(
            word,
            f"{word}: is a shell script; to print jaxgpt's command for it, run "
            f"python -m jaxgpt.convert command {shlex.quote(word)}",
        )
    elif any(os.path.exists(os.path.join(word, name)) for name in _IN_RUNS):
        line.leave_out(
            word,
            f"{word}: is a run directory; to resume the run, use --out {word}; to start a new run "
            f"from its weights, use train.init_from={word}",
        )
    elif os.path.exists(word):
        line.leave_out(
            word,
            f"{word}: to train on text, run python -m jaxgpt.prepare text --input {word} "
            "--out FOLDER, then set data.path=FOLDER",
        )
    else:
        line.leave_out(word, f"{word!r}: must be section.key=value or --section.key value")
