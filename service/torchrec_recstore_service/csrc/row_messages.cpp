// The messages of calls on rows in protobuf's encoding (https://protobuf.dev/programming-guides/encoding). Two messages
// of a few fields do not need a library that a wheel would have to carry; tests/service/test_row_messages.py compares
// them with protobuf's own.

#include "row_messages.h"

#include <cstring>

namespace recstore_service {
namespace {

[[noreturn]] void damaged() { invalid("the message is not a SegmentRequest"); }

class Reader {
 public:
  Reader(const char* data, size_t size) : at_(data), end_(data + size) {}

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
  uint64_t field(const char* types) const { return field_ < std::strlen(types) && types[field_] == '0' + static_cast<char>(type_) ? field_ : 0; }

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

TableIds table_ids(Reader reader) {
  TableIds table;
  while (reader.next()) {
    switch (reader.field("-2001")) {
      case 1: table.table = reader.text(); break;
      case 2: table.ids = reader.number(); break;
      case 3: table.zeros = reader.number() != 0; break;
      case 4: table.learning_rate = reader.real(); break;
      default: reader.skip();
    }
  }
  return table;
}

void read_pull(Reader reader, RowRequest& request) {
  request.is_pull = true;
  while (reader.next()) {
    switch (reader.field("-2202")) {
      case 1: request.table = reader.text(); break;
      case 2: request.epoch = reader.text(); break;
      case 3: request.want = static_cast<Want>(reader.enumeration()); break;
      case 4: request.tables.push_back(table_ids(reader.message())); break;
      default: reader.skip();
    }
  }
}

void read_write(Reader reader, RowRequest& request) {
  request.is_pull = false;
  while (reader.next()) {
    switch (reader.field("-222000002")) {
      case 1: request.table = reader.text(); break;
      case 2: request.epoch = reader.text(); break;
      case 3: request.client = reader.text(); break;
      case 4: request.request = reader.number(); break;
      case 5: request.done_before = reader.number(); break;
      case 6: request.kind = static_cast<Kind>(reader.enumeration()); break;
      case 7: request.ids = reader.number(); break;
      case 8: request.float32 = reader.number() != 0; break;
      case 9: request.tables.push_back(table_ids(reader.message())); break;
      default: reader.skip();
    }
  }
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}
void put_number(std::string& out, int field, uint64_t value) {
  if (value == 0) return;
  put_varint(out, static_cast<uint64_t>(field) << 3);
  put_varint(out, value);
}
void put_text(std::string& out, int field, const std::string& text) {
  if (text.empty()) return;
  put_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  put_varint(out, text.size());
  out += text;
}

}  // namespace

RowRequest parse_request(const char* data, size_t size) {
  RowRequest request;
  bool has_call = false;
  for (Reader reader(data, size); reader.next();) {
    const uint64_t field = reader.field("-220000");
    if (field == 1 || field == 2) {
      const bool is_pull = field == 1;
      if (has_call && request.is_pull != is_pull) {  // the call replaces the one before; one of the same kind is added to it
        const auto sizes = request.sizes;
        request = {};
        request.sizes = sizes;
      }
      has_call = true;
      field == 1 ? read_pull(reader.message(), request) : read_write(reader.message(), request);
    } else if (field >= 3 && field <= 6) {
      request.sizes[field - 3] = reader.number();
    } else {
      reader.skip();
    }
  }
  if (!has_call) invalid("the message has neither a pull nor a write");
  return request;
}

std::string RowReply::serialized() const {
  std::string out;
  put_number(out, 1, static_cast<uint64_t>(status.code));
  put_text(out, 2, status.details);
  put_text(out, 3, status.error);
  put_number(out, 4, found);
  put_number(out, 5, rows);
  put_number(out, 6, deleted);
  put_number(out, 7, last ? 1 : 0);
  return out;
}

bool is_utf8(const char* text, size_t size) {
  const auto* at = reinterpret_cast<const uint8_t*>(text);
  const auto* end = at + size;
  while (at < end) {
    const uint8_t first = *at++;
    if (first < 0x80) continue;
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || end - at < more) return false;
    // The second byte decides whether the code is overlong, a surrogate, or above U+10FFFF.
    const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (at[0] < low || at[0] > high) return false;
    for (int i = 1; i < more; ++i) {
      if ((at[i] & 0xC0) != 0x80) return false;
    }
    at += more;
  }
  return true;
}

}  // namespace recstore_service
