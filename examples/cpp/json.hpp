// The JSON of manifests and safetensors headers: objects, arrays, strings and whole numbers.
#pragma once

#include <cctype>
#include <charconv>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace trt_lora {

// A value. Words (true, false, null) and fractions stay text: nothing here reads them.
class Json {
 public:
  // Throws std::runtime_error where the text is not JSON, or nests deeper than 64.
  static Json parse(std::string_view text) {
    Reader reader{text};
    Json value = reader.value(0);
    if (reader.next() != '\0') reader.fail("the end");
    return value;
  }

  const Json& at(const std::string& key) const {
    const auto found = fields_.find(key);
    if (found == fields_.end()) throw std::runtime_error("there is no \"" + key + "\"");
    return found->second;
  }

  std::int64_t number() const {
    std::int64_t value = 0;
    const char* const end = text_.data() + text_.size();
    const auto [used, fault] = std::from_chars(text_.data(), end, value);
    if (used != end || fault != std::errc()) {
      throw std::runtime_error('"' + text_ + "\" is no whole number");
    }
    return value;
  }

  const std::string& text() const { return text_; }
  const std::vector<Json>& items() const { return items_; }
  const std::map<std::string, Json>& fields() const { return fields_; }
  bool has(const std::string& key) const { return fields_.count(key) != 0; }

 private:
  struct Reader {
    std::string_view text;
    std::size_t place = 0;

    [[noreturn]] void fail(const std::string& expected) const {
      throw std::runtime_error("JSON: expected " + expected + " at " + std::to_string(place));
    }

    char next() {
      while (place < text.size() && std::isspace(static_cast<unsigned char>(text[place]))) ++place;
      return place < text.size() ? text[place] : '\0';
    }

    void take(char expected) {
      if (next() != expected) fail(std::string(1, expected));
      ++place;
    }

    Json value(int depth) {
      if (depth > 64) fail("less nesting");
      Json result;
      switch (next()) {
        case '{':
          list('{', '}', [&] {
            std::string key = string();
            take(':');
            result.fields_.insert_or_assign(std::move(key), value(depth + 1));
          });
          break;
        case '[':
          list('[', ']', [&] { result.items_.push_back(value(depth + 1)); });
          break;
        case '"':
          result.text_ = string();
          break;
        default:
          result.text_ = word();
      }
      return result;
    }

    template <typename Item>
    void list(char open, char close, Item item) {
      take(open);
      if (next() != close) {
        item();
        for (; next() == ','; item()) ++place;
      }
      take(close);
    }

    std::string word() {
      static constexpr std::string_view kEnds = ",]}: \t\r\n";
      const std::size_t start = place;
      while (place < text.size() && kEnds.find(text[place]) == std::string_view::npos) ++place;
      if (place == start) fail("a value");
      return std::string(text.substr(start, place - start));
    }

    std::string string() {
      take('"');
      std::string result;
      while (place < text.size() && text[place] != '"') {
        if (text[place] == '\\') {
          result += escaped();
        } else {
          result += text[place++];
        }
      }
      take('"');
      return result;
    }

    char escaped() {
      static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
      ++place;
      const std::size_t found = place < text.size() ? kFrom.find(text[place]) : kFrom.size();
      if (found >= kFrom.size()) fail("an escape other than \\u");
      ++place;
      return kTo[found];
    }
  };

  std::string text_;
  std::vector<Json> items_;
  std::map<std::string, Json> fields_;
};

}  // namespace trt_lora
