"""What `trt-lora doctor` and `trt-lora list` find: the machine, where an engine runs, files."""
