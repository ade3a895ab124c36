"""Tab completion of commands, settings, values and presets in bash and zsh."""

from collections.abc import Collection

from jaxgpt.config.parse import presets
from jaxgpt.config.schema import settings
from jaxgpt.config.values import words_of

# bash splits words at `=`, so `key=va` arrives as the three words `key`, `=` and `va`.
SCRIPT = """\
# shell completion for jaxgpt; in zsh, run `autoload -U +X bashcompinit && bashcompinit` first
_jaxgpt() {
    local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} key= words=
    if [[ $word == "=" ]]; then
        key=${last#--} word=
    elif [[ $last == "=" ]]; then
        key=${COMP_WORDS[COMP_CWORD-2]#--}
    elif [[ $last == --* ]]; then
        key=${last#--}
    fi
    COMPREPLY=()
    if [[ $last == "-m" ]]; then
        words="@MODULES@"
    elif [[ ${COMP_WORDS[0]} == jaxgpt && $COMP_CWORD == 1 ]]; then
        words="@COMMANDS@"
    elif [[ " ${COMP_WORDS[*]} " =~ \\ (jaxgpt|-m\\ jaxgpt\\.)\\ ?(train|plan|inspect)\\  ]]; then
        case $key in
@VALUES@
        *)
            compopt -o nospace 2>/dev/null
            words="--config --mesh --out --train-range-to-skip --help @KEYS@" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _jaxgpt jaxgpt python python3"""


def bash_script(commands: Collection[str]) -> str:
    """Return a shell script that completes jaxgpt command lines.

    `commands` are the names of the commands, such as train.
    """
    values = {key: words_of(kind) for key, kind in settings().items()}
    values |= {"config": list(presets())}
    branches = [
        f'        {key}) words="{" ".join(words)}" ;;' for key, words in values.items() if words
    ]
    return (
        SCRIPT.replace("@VALUES@", "\n".join(branches))
        .replace("@KEYS@", " ".join(f"{key}=" for key in settings() if "." in key))
        .replace("@MODULES@", " ".join(f"jaxgpt.{name}" for name in commands))
        .replace("@COMMANDS@", " ".join(commands))
    )
