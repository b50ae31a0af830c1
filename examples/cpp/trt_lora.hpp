// The contract between an engine and an adapter, for C++: names, shapes, scale, padding.
//
//   y = base(x) + (x @ A) @ B        A [k, r], B [r, n], row-major, the scale folded into B
//
// Nothing of TensorRT is needed here. What does not fit throws std::runtime_error by its name.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.hpp"

namespace trt_lora {

inline constexpr std::int64_t kMinRank = 1;  // of a dummy: no input of an engine may be empty
inline constexpr std::int64_t kRankMultiple = 8;  // of plans with kernels of ours (plugin, aot)

// Factor and site of an engine's LoRA input, from its name in either spelling.
struct Input {
  char factor;  // 'A' or 'B'
  std::string site;  // model.layers.0.self_attn.q_proj
};

inline std::optional<Input> parseInput(const std::string& name) {
  for (const char factor : {'A', 'B'}) {
    const std::string prefix = std::string("lora_") + factor + "_";
    const std::string suffix = std::string(".lora_") + factor + ".weight";
    if (name.size() > prefix.size() && name.rfind(prefix, 0) == 0) {
      return Input{factor, name.substr(prefix.size())};
    }
    const std::size_t end = name.size() - std::min(name.size(), suffix.size());
    if (end > 0 && name.compare(end, suffix.size(), suffix) == 0) {
      return Input{factor, name.substr(0, end)};
    }
  }
  return std::nullopt;
}

// A linear that takes LoRA.
struct Site {
  std::int64_t k, n;
  std::string dtype;  // of A, B and the activation: float32, float16 or bfloat16
};

// What manifest.json says that a caller needs.
struct Manifest {
  std::string fingerprint;  // of the base model
  std::map<std::string, Site> sites;  // by path
  std::map<std::string, std::string> inPlaceOf;  // output -> the input whose memory it takes
  std::int64_t maxLoraRank, rankMultiple, maxLoras;
  std::string loraPlugin;
};

inline void check(bool done, const std::string& otherwise) {
  if (!done) throw std::runtime_error(otherwise);
}

inline std::vector<char> readFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  check(file.good(), path + " cannot be opened");
  return {std::istreambuf_iterator<char>(file), {}};
}

inline Manifest readManifest(const std::string& directory) {
  const std::vector<char> text = readFile(directory + "/manifest.json");
  const Json json = Json::parse({text.data(), text.size()});
  check(json.at("schema_version").number() == 2, directory + " has another schema_version");
  Manifest result;
  result.fingerprint = json.at("base_model").at("fingerprint").text();
  for (const Json& site : json.at("sites").items()) {
    const Site found{site.at("k").number(), site.at("n").number(), site.at("dtype").text()};
    result.sites[site.at("path").text()] = found;
  }
  for (const Json& output : json.at("outputs").items()) {
    const std::string& input = output.at("in_place_of").text();
    if (!input.empty()) result.inPlaceOf[output.at("name").text()] = input;
  }
  result.maxLoraRank = json.at("max_lora_rank").number();
  result.maxLoras = json.at("max_loras").number();
  result.loraPlugin = json.at("lora_plugin").text();
  result.rankMultiple = result.loraPlugin == "native" ? 1 : kRankMultiple;
  return result;
}

// A matrix in host memory, row-major.
struct Matrix {
  std::string dtype;  // as manifests spell it
  std::int64_t rows, columns;
  std::vector<char> bytes;
};

// The file that `trt-lora convert-adapter --format edgellm` writes.
struct Adapter {
  std::string fingerprint;  // of the base model it was converted for; empty if the file has none
  std::map<std::string, Matrix> tensors;
};

inline std::int64_t itemBytes(const std::string& dtype) { return dtype == "float32" ? 4 : 2; }

inline Matrix readMatrix(const std::string& name, const Json& entry, const char* data,
                         std::size_t size) {
  static const std::map<std::string, std::string> kDtypes{
      {"F32", "float32"}, {"F16", "float16"}, {"BF16", "bfloat16"}};
  const auto dtype = kDtypes.find(entry.at("dtype").text());
  const auto& shape = entry.at("shape").items();
  check(dtype != kDtypes.end() && shape.size() == 2, name + " is no matrix of floats");
  Matrix matrix{dtype->second, shape[0].number(), shape[1].number(), {}};
  const std::int64_t begin = entry.at("data_offsets").items().at(0).number();
  const std::int64_t end = entry.at("data_offsets").items().at(1).number();
  const std::int64_t most = std::int64_t{1} << 24;  // of a side, so that no product overflows
  const bool inside = 0 <= begin && begin <= end && end <= static_cast<std::int64_t>(size);
  const auto isSide = [most](std::int64_t side) { return 0 < side && side <= most; };
  check(inside && isSide(matrix.rows) && isSide(matrix.columns) &&
            end - begin == matrix.rows * matrix.columns * itemBytes(matrix.dtype),
        name + ": shape, dtype and bytes do not agree");
  matrix.bytes.assign(data + begin, data + end);
  return matrix;
}

inline Adapter readAdapter(const std::string& path) {
  const std::vector<char> file = readFile(path);
  std::uint64_t length = 0;  // little-endian, before the header
  if (file.size() >= sizeof length) std::memcpy(&length, file.data(), sizeof length);
  check(file.size() >= sizeof length && length <= file.size() - sizeof length,
        path + " is no safetensors file");
  const Json header = Json::parse({file.data() + sizeof length, length});
  const char* const data = file.data() + sizeof length + length;
  Adapter result;
  for (const auto& [name, entry] : header.fields()) {
    if (name != "__metadata__") {
      result.tensors[name] = readMatrix(name, entry, data, file.size() - sizeof length - length);
    } else if (entry.has("trt_lora.base_fingerprint")) {
      result.fingerprint = entry.at("trt_lora.base_fingerprint").text();
    }
  }
  return result;
}

// The matrix in the upper left corner of zeros [rows, columns].
inline Matrix padded(const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
  const std::int64_t item = itemBytes(matrix.dtype);
  Matrix result{matrix.dtype, rows, columns, std::vector<char>(rows * columns * item)};
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    std::copy_n(&matrix.bytes[row * matrix.columns * item], matrix.columns * item,
                &result.bytes[row * columns * item]);
  }
  return result;
}

// A and B of a site.
using Pair = std::array<Matrix, 2>;

// Pairs by site, checked against the engine, ranks padded as its plan wants them; sites that are
// left out take a dummy.
inline std::map<std::string, Pair> fit(const Adapter& adapter, const Manifest& manifest) {
  check(manifest.maxLoras == 0, "the engine has slots, whose inputs are stacks");
  check(adapter.fingerprint.empty() || adapter.fingerprint == manifest.fingerprint,
        "the adapter was converted for another base model");
  std::map<std::string, std::array<const Matrix*, 2>> found;
  for (const auto& [name, matrix] : adapter.tensors) {
    const std::optional<Input> input = parseInput(name);
    check(input && manifest.sites.count(input->site), name + " has no site");
    found[input->site][input->factor == 'B'] = &matrix;
  }
  std::map<std::string, Pair> result;
  for (const auto& [path, pair] : found) {
    const auto [a, b] = pair;
    const auto& [k, n, dtype] = manifest.sites.at(path);
    check(a && b, path + " has one factor of two");
    const std::int64_t rank = a->columns, multiple = manifest.rankMultiple;
    check(a->rows == k && b->columns == n && b->rows == rank,
          path + ": expected A [k, r] and B [r, n] with k=" + std::to_string(k) + " and n=" +
              std::to_string(n));
    check(a->dtype == dtype && b->dtype == dtype, path + ": expected " + dtype);
    check(rank <= manifest.maxLoraRank, path + ": rank " + std::to_string(rank) +
                                            ", expected 1 to " +
                                            std::to_string(manifest.maxLoraRank));
    const std::int64_t wide =
        std::min((rank + multiple - 1) / multiple * multiple, manifest.maxLoraRank);
    result[path] = {padded(*a, k, wide), padded(*b, wide, n)};
  }
  return result;
}

}  // namespace trt_lora
