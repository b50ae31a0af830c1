from trt_lora.runtime.serving.batcher_config import BatcherConfig as ServingConfig
