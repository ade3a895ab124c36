"""The commands of jaxgpt: `python -m jaxgpt [COMMAND ...]`, or `jaxgpt [COMMAND ...]`."""

import runpy
import sys

COMMANDS = {
    "train": "train a GPT, or go on with a run",
    "prepare": "make token files of texts",
    "sample": "write text with a trained model",
    "evaluate": "measure the loss of a whole split, or run lm_eval's tasks",
    "convert": "take weights from Hugging Face, nanoGPT, Megatron, and back",
    "inspect": "show the text that a step trained on",
    "replay": "repeat steps of a run, and compare them with what it logged",
    "plan": "say what a layout needs, or which one fits, without the devices",
    "doctor": "check a machine: devices, network, collectives, file system",
    "launch": "start a job with the machine's own launcher",
    "report": "show start-up times or spikes of runs",
    "bench": "measure how fast jaxgpt is here",
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "help"):
        print("python -m jaxgpt.COMMAND [--help], or jaxgpt COMMAND [--help]:")
        for command, what in COMMANDS.items():
            print(f"  {command:<9}{what}")
        return
    if name not in COMMANDS:
        print(f"error: {name}: is no command; take {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"jaxgpt {name}", *sys.argv[2:]]
    runpy.run_module(f"jaxgpt.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
