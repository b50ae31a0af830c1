"""`python -m trt_lora`: the command `trt-lora`."""

from trt_lora.scripts.trt_lora_command import main

if __name__ == "__main__":
    main()
