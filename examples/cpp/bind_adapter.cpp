// Bind an adapter to an engine by hand, run one decode step, and print its first logits' bits.
//
//   bind_adapter ENGINE_DIRECTORY ADAPTER/processed_adapter_model.safetensors
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>

#include "trt_lora.hpp"

using nvinfer1::TensorIOMode;
using trt_lora::check;

struct Logger : nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kERROR) std::fprintf(stderr, "%s\n", message);
  }
};

void* zeros(const nvinfer1::Dims& dims) {
  std::size_t bytes = 8;  // an element, which is enough for every dtype
  for (int i = 0; i < dims.nbDims; ++i) bytes *= static_cast<std::size_t>(dims.d[i]);
  void* memory = nullptr;  // for good: this program ends
  check(cudaMalloc(&memory, bytes) == cudaSuccess, "the GPU is out of memory");
  check(cudaMemset(memory, 0, bytes) == cudaSuccess, "the GPU's memory cannot be set");
  return memory;
}

void run(const std::string& directory, const std::string& file) {
  const trt_lora::Manifest manifest = trt_lora::readManifest(directory);
  const auto adapter = trt_lora::fit(trt_lora::readAdapter(file), manifest);
  check(manifest.loraPlugin != "plugin", "build the engine with --lora-plugin native or aot");

  Logger logger;
  const auto plan = trt_lora::readFile(directory + "/engine.plan");
  const std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(logger));
  check(runtime != nullptr, "TensorRT does not start");
  const std::unique_ptr<nvinfer1::ICudaEngine> engine(
      runtime->deserializeCudaEngine(plan.data(), plan.size()));
  check(engine != nullptr, "TensorRT refuses the plan on this GPU");
  const std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext(
      nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
  check(context != nullptr, "TensorRT makes no execution context");
  const std::int64_t activations = engine->getDeviceMemorySizeV2();
  context->setDeviceMemoryV2(zeros({1, {activations / 8 + 1}}), activations);

  std::map<std::string, void*> memory;  // by input and output
  for (int i = 0; i < engine->getNbIOTensors(); ++i) {
    const char* name = engine->getIOTensorName(i);
    if (engine->getTensorIOMode(name) != TensorIOMode::kINPUT) continue;
    // Profile 0 is `decode`. Token 0 behind an empty cache: all but the adapter is zero.
    auto dims = engine->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
    const auto input = trt_lora::parseInput(name);
    const bool isB = input && input->factor == 'B';
    const auto pair = input ? adapter.find(input->site) : adapter.end();
    const bool adapted = pair != adapter.end();
    if (input) dims.d[isB ? 0 : 1] = adapted ? pair->second[0].columns : trt_lora::kMinRank;
    memory[name] = zeros(dims);
    if (adapted) {
      const std::vector<char>& bytes = pair->second[isB].bytes;
      check(cudaMemcpy(memory[name], bytes.data(), bytes.size(), cudaMemcpyHostToDevice) ==
                cudaSuccess, name);
    }
    check(context->setInputShape(name, dims), name);
    check(context->setTensorAddress(name, memory[name]), name);
  }
  for (int i = 0; i < engine->getNbIOTensors(); ++i) {
    const char* name = engine->getIOTensorName(i);
    if (engine->getTensorIOMode(name) != TensorIOMode::kOUTPUT) continue;
    const auto shared = manifest.inPlaceOf.find(name);  // the cache is written where it lies
    memory[name] = shared == manifest.inPlaceOf.end() ? zeros(context->getTensorShape(name))
                                                      : memory.at(shared->second);
    check(context->setTensorAddress(name, memory[name]), name);
  }
  check(context->enqueueV3(nullptr), "TensorRT does not run the step");
  unsigned logits[4] = {};
  check(cudaMemcpy(logits, memory.at("logits"), sizeof logits, cudaMemcpyDeviceToHost) ==
            cudaSuccess, "the step failed");
  for (const unsigned bits : logits) std::printf("%08x ", bits);
}

int main(int count, char** words) try {
  check(count == 3, "bind_adapter ENGINE_DIRECTORY ADAPTER_FILE");
  run(words[1], words[2]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
