"""The managers of Edge-LLM, MAX, TensorRT-LLM and vLLM, each a face of `AdapterStore`."""
