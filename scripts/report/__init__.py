"""`trt-lora report`: an engine as one page of HTML."""
