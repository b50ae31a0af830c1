"""vLLM's LoRA server over an engine; needs the extra `serve`. Only this folder imports the web."""
