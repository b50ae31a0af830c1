"""The managers' interfaces of MAX, TensorRT-LLM and vLLM, each a face of `AdapterStore`."""
