// The messages of calls on rows in protobuf's encoding (https://protobuf.dev/programming-guides/encoding). Two messages
// of a few fields do not need a library that a wheel would have to carry; tests/service/test_row_messages.py compares
// them with protobuf's own.

#include "row_messages.h"

#include "message_fields.h"

namespace recstore_service {
namespace {

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

// The fields of the message are not needed here.
void check_message(Reader reader) {
  while (reader.next()) reader.skip();
}

void read_write(Reader reader, RowRequest& request) {
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

}  // namespace

RowRequest parse_request(const char* data, size_t size) {
  RowRequest request;
  bool has_call = false;
  for (Reader reader(data, size); reader.next();) {
    const uint64_t field = reader.field("-22000022");
    // A call replaces the one before, and one of the same kind is added to it.
    const auto begin_call = [&](Call call) {
      if (has_call && request.call != call) {
        const auto sizes = request.sizes;
        request = {};
        request.sizes = sizes;
      }
      has_call = true;
      request.call = call;
    };
    switch (field) {
      case 1:
        begin_call(Call::kPull);
        read_pull(reader.message(), request);
        break;
      case 2:
        begin_call(Call::kWrite);
        read_write(reader.message(), request);
        break;
      case 3:
      case 4:
      case 5:
      case 6: request.sizes[field - 3] = reader.number(); break;
      case 7:
        begin_call(Call::kDescribe);
        check_message(reader.message());
        break;
      case 8:
        begin_call(Call::kAttach);
        check_message(reader.message());
        break;
      default: reader.skip();
    }
  }
  if (!has_call) invalid("the message has no call that this server knows");
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
  put_text(out, 8, server);
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
