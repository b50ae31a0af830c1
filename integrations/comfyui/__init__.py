"""Nodes for ComfyUI: link this folder as ComfyUI/custom_nodes/trt_lora; see docs/comfyui.md."""

from .nodes import EngineLoader, LoraStack

NODE_CLASS_MAPPINGS = {"TrtLoraEngineLoader": EngineLoader, "TrtLoraStack": LoraStack}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TrtLoraEngineLoader": "Load Engine (trt-lora)",
    "TrtLoraStack": "LoRA Stack (trt-lora)",
}
