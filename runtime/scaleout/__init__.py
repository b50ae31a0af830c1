"""The server on engines of many machines: for Ray Serve, NVIDIA Dynamo and Triton, a file each."""
