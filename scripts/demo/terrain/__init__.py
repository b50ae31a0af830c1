"""LoRA for a diffusion model that exists as an ONNX file alone: trained, and shown as pictures."""
