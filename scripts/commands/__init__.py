"""One file for each subcommand of `trt-lora`."""
