"""`trt-lora compare`: an engine against a reference, through polygraphy."""
