// Prints an adapter as `fit` gives it: a line for each site, the matrices as hexadecimal bytes.
#include <cstdio>

#include "trt_lora.hpp"

int main(int, char** words) try {
  const trt_lora::Manifest manifest = trt_lora::readManifest(words[1]);
  for (const auto& [site, pair] : trt_lora::fit(trt_lora::readAdapter(words[2]), manifest)) {
    std::printf("%s", site.c_str());
    for (const trt_lora::Matrix& matrix : pair) {
      std::printf(" %d %d ", static_cast<int>(matrix.rows), static_cast<int>(matrix.columns));
      for (const char byte : matrix.bytes) std::printf("%02x", static_cast<unsigned char>(byte));
    }
    std::printf("\n");
  }
} catch (const std::exception& error) {
  std::printf("refused: %s\n", error.what());
}
