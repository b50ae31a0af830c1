"""`python -m trt_lora`: the command `trt-lora`."""

from trt_lora.scripts.entry_points import trt_lora

if __name__ == "__main__":
    trt_lora()
