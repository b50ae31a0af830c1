"""Write adapters by the tools themselves, and what they add by their own arithmetic.

    pip install diffusers==0.42.1 lycoris-lora==4.1.3 peft==0.21.2; python make_files.py

Beside every `NAME.safetensors` is `NAME.expected.safetensors`: path -> what the tool adds to the
weight there, [n, k], of a convolution (channel, tap). LyCORIS': what its forward adds to a layer
with unit inputs, for its merged weights are scaled twice. diffusers': PEFT's delta of a weight.
"""

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LYCORIS = {
    "locon": {"algo": "locon"},
    "locon_tucker": {"algo": "locon", "use_tucker": True},
    "loha": {"algo": "loha"},
    "loha_tucker": {"algo": "loha", "use_tucker": True},
    "lokr": {"algo": "lokr", "factor": 2, "dim": 2},
    "lokr_both": {"algo": "lokr", "factor": 4, "dim": 1, "decompose_both": True},
    "lokr_tucker": {"algo": "lokr", "factor": 2, "dim": 2, "use_tucker": True},
    "lokr_full": {"algo": "lokr", "factor": 4, "dim": 100},
}


class Net(torch.nn.Module):
    """A linear and two convolutions."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(24, 16, bias=False)
        self.one = torch.nn.Conv2d(24, 16, 1, bias=False)
        self.wide = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False)


def added(layer):
    """[n, k] of a layer whose own weight is 0, by a unit input for each of k."""
    if isinstance(layer, torch.nn.Linear):
        return layer(torch.eye(layer.in_features)).T
    channels, taps = layer.in_channels, layer.kernel_size
    units = torch.eye(channels * taps[0] * taps[1]).reshape(-1, channels, *taps)
    return layer(units)[:, :, taps[0] // 2, taps[1] // 2].T


def lycoris(name, algo, dim=3, **options):
    os.environ["LYCORIS_LOG"] = "ERROR"
    from lycoris import LycorisNetwork, create_lycoris

    LycorisNetwork.apply_preset({"target_module": ["Net"], "enable_conv": True})
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    made = create_lycoris(net, 1.0, dim, 2, conv_dim=dim, conv_alpha=1, algo=algo, **options)
    made.apply_to()
    for parameter in made.parameters():
        if parameter.dim():
            torch.nn.init.normal_(parameter, std=0.5)
    save(name, {k: v.detach() for k, v in made.state_dict().items()},
         {path: added(getattr(net, path)) for path in ("lin", "one", "wide")})  # fmt: skip


def save(name, tensors, expected):
    contiguous = [{k: v.detach().contiguous() for k, v in d.items()} for d in (tensors, expected)]
    for found, end in zip(contiguous, ("", ".expected"), strict=True):
        save_file(found, HERE / f"{name}{end}.safetensors")


def diffusers():
    """UNet and text encoder of one pipeline in one file, with alphas in its metadata."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from peft import LoraConfig, get_peft_model_state_dict
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=12, norm_num_groups=4,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
    text = CLIPTextModel(CLIPTextConfig(hidden_size=12, intermediate_size=24, vocab_size=100,
                                        num_hidden_layers=2, num_attention_heads=2))  # fmt: skip
    unet.add_adapter(LoraConfig(
        r=2, lora_alpha=6,
        target_modules=["attn1.to_q", "down_blocks.0.resnets.0.conv1",
                        "mid_block.attentions.0.proj_in"],
        rank_pattern={"conv1": 3}, alpha_pattern={"to_q": 1}))  # fmt: skip
    text.add_adapter(LoraConfig(r=2, lora_alpha=1, use_rslora=True, target_modules=["fc1"]))
    for model in (unet, text):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        StableDiffusionPipeline.save_lora_weights(
            folder,
            unet_lora_layers=get_peft_model_state_dict(unet),
            text_encoder_lora_layers=get_peft_model_state_dict(text),
            unet_lora_adapter_metadata=unet.peft_config["default"].to_dict(),
            text_encoder_lora_adapter_metadata=text.peft_config["default"].to_dict(),
        )
        data = Path(folder, "pytorch_lora_weights.safetensors").read_bytes()
    (HERE / "diffusers.safetensors").write_bytes(data)
    expected = {
        f"{component}.{path}": layer.get_delta_weight("default").flatten(1).contiguous()
        for component, model in (("unet", unet), ("text_encoder", text))
        for path, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    save_file(expected, HERE / "diffusers.expected.safetensors")


if __name__ == "__main__":
    for name, options in LYCORIS.items():
        lycoris(name, **options)
    diffusers()
    for file in sorted(HERE.glob("*.safetensors")):
        print(file.stat().st_size, file.name, *list(load_file(file))[:2])
