"""Write a GPT-2 of Hugging Face's with given weights: `python save_hugging_face.py FOLDER`.

FOLDER has model.json, weights.npz with nanoGPT's names, and tokenizer.json.
Runs in a Python with torch and transformers.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

folder = Path(sys.argv[1])
about = json.loads((folder / "model.json").read_text())
weights = dict(np.load(folder / "weights.npz"))
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
        n_layer=about["n_layer"],
        n_head=about["n_head"],
        n_embd=about["n_embd"],
        n_positions=about["block_size"],
        vocab_size=about["vocab_size"],
        activation_function="gelu",
        bos_token_id=about["end_of_text"],
        eos_token_id=about["end_of_text"],
    )
)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        value = weights[name]
        is_conv1d = ".c_" in name and name.endswith("weight")  # Conv1D stores (in, out)
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value.T if is_conv1d else value)))
model.save_pretrained(folder)
end = "<|endoftext|>"
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(folder / "tokenizer.json"), bos_token=end, eos_token=end, unk_token=end
)
tokenizer.save_pretrained(folder)
