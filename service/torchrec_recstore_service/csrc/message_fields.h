#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "row_messages.h"
#include "status.h"

namespace recstore_service {

// Reads the fields of a message in protobuf's encoding, which may be any bytes. Functions throw CallFailed.
class Reader {
 public:
  Reader(const char* data, size_t size) : at_(data), end_(data + size) {}

  // Whether all bytes were read.
  bool at_end() const { return at_ == end_; }
  // Moves to the next field. Returns false at the end of the message.
  bool next() {
    if (at_ == end_) return false;
    const uint64_t tag = varint(kShortVarint);
    field_ = tag >> 3;
    type_ = tag & 7;
    if (field_ == 0 || field_ >= (uint64_t{1} << 29)) damaged();
    return true;
  }
  // The number of the field; 0 if the type is not the expected one, which makes the field one that is not known.
  uint64_t field(const char* types) const {
    return field_ < std::strlen(types) && types[field_] == '0' + static_cast<char>(type_) ? field_ : 0;
  }

  uint64_t number() { return varint(kVarint); }
  uint64_t enumeration() { return static_cast<uint32_t>(number()); }  // protobuf takes the lower bits
  double real() {
    double value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  Reader message() {
    const uint64_t size = varint(kShortVarint);
    return {take(size), size};
  }
  std::string text() {
    const Reader inner = message();
    if (!is_utf8(inner.at_, static_cast<size_t>(inner.end_ - inner.at_))) damaged();
    return {inner.at_, inner.end_};
  }
  void skip() {
    switch (type_) {
      case 0: varint(kVarint); break;
      case 1: take(8); break;
      case 2: take(varint(kShortVarint)); break;
      case 5: take(4); break;
      default: damaged();
    }
  }

 private:
  [[noreturn]] static void damaged() { invalid("the message cannot be read"); }

  static constexpr int kVarint = 70, kShortVarint = 35;  // the bits of a number, and of a tag or a size
  uint64_t varint(int bits) {
    uint64_t value = 0;
    for (int shift = 0; shift < bits; shift += 7) {
      const auto byte = static_cast<uint8_t>(*take(1));
      if (shift < 64) value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    damaged();
  }
  const char* take(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) damaged();
    const char* taken = at_;
    at_ += size;
    return taken;
  }

  const char* at_;
  const char* end_;
  uint64_t field_ = 0;
  uint64_t type_ = 0;
};

// Add a field to a message, unless it has its default value.
inline void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}
inline void put_number(std::string& out, int field, uint64_t value) {
  if (value == 0) return;
  put_varint(out, static_cast<uint64_t>(field) << 3);
  put_varint(out, value);
}
inline void put_text(std::string& out, int field, const std::string& text) {
  if (text.empty()) return;
  put_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  put_varint(out, text.size());
  out += text;
}

}  // namespace recstore_service
