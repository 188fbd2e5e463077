"""Load an exported folder with the `speculators` library, in its own environment: load_in_speculators.py FOLDER FILE.

FILE holds input_ids (1, T) and taps (1, T, 3 D); the logits of the first step, (1, T, Vd), take their place.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


def main(folder: str, file: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # its own needs a GPU
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
    state, tensors = model.state_dict(), load_file(f"{folder}/model.safetensors")
    assert {name for name in state if not name.startswith("verifier_")} == tensors.keys()
    assert all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in tensors.items())
    probe, logits = load_file(file), []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
    with torch.no_grad():
        model.eval()(probe["taps"], probe["input_ids"], torch.zeros_like(probe["input_ids"]), ttt_steps=1)
    save_file({"logits": logits[0]}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
