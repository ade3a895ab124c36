"""The commands of jaxgpt: `python -m jaxgpt [COMMAND ...]`, or `jaxgpt [COMMAND ...]`."""

import runpy
import sys

COMMANDS = {
    "train": "train a GPT, or resume a run",
    "prepare": "turn text into token files",
    "sample": "generate text with a trained model",
    "evaluate": "compute the loss on a whole split, or run lm_eval tasks",
    "convert": "import weights from Hugging Face, nanoGPT or Megatron, or export them",
    "inspect": "show the text that a step trained on",
    "replay": "repeat steps of a run and compare them with the records",
    "plan": "estimate memory, communication and time on devices that you do not have",
    "doctor": "check a machine: devices, network, collectives, file system",
    "launch": "start a job with the machine's own launcher",
    "report": "show runs as a page, a live view or tables: curves, start-up, goodput, spikes",
    "bench": "measure how fast jaxgpt is on this machine",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "help"):
        print("python -m jaxgpt.COMMAND [--help], or jaxgpt COMMAND [--help]:")
        for command, what in COMMANDS.items():
            print(f"  {command:<9}{what}")
        print('To complete settings with the Tab key: eval "$(python -m jaxgpt completion)"')
        return
    if name == "completion":
        from jaxgpt.config.completion import bash_script

        print(bash_script(COMMANDS))
        return
    if name not in COMMANDS:
        from jaxgpt.config import nearest

        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(COMMANDS)}"
        print(f"error: {name}: unknown command; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"jaxgpt {name}", *sys.argv[2:]]
    runpy.run_module(f"jaxgpt.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
