"""A model of Triton's Python backend; its repository takes `model.py` and `config.pbtxt`."""
