#pragma once

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "connection.h"
#include "error.h"

namespace recstore::detail {

using Connections = std::vector<std::unique_ptr<Connection>>;

// The part of torchrec_recstore_service.wire.table_spec.TableSpec that a client needs. dim is 0 if it cannot be read.
struct Spec {
  int64_t dim = 0, shard = 0, shards = 0;
  std::string dtype;
};

inline Spec spec_of(const std::string& json) {
  google::protobuf::Struct fields;
  if (!google::protobuf::util::JsonStringToMessage(json, &fields).ok()) return {};
  const auto& values = fields.fields();
  if (!values.count("dim") || !values.count("dtype") || !values.count("shard")) return {};
  const auto& shard = values.at("shard").list_value();
  if (shard.values_size() != 2) return {};
  return {static_cast<int64_t>(values.at("dim").number_value()), static_cast<int64_t>(shard.values(0).number_value()),
          static_cast<int64_t>(shard.values(1).number_value()), values.at("dtype").string_value()};
}

inline std::string joined(const Connections& connections, const char* separator) {
  std::string text;
  for (const auto& connection : connections) text += (text.empty() ? "" : separator) + connection->address();
  return text;
}

inline std::string state_of(const pb::DescribeReply& state) {
  const std::string epoch = "epoch " + std::to_string(state.epoch());
  if (state.set().empty()) return state.at().name().empty() ? "is empty" : "is in no set and has the save '" + state.at().name() + "'";
  if (state.live()) return "is in " + epoch;
  const std::string rows = state.at().name().empty() ? "without rows" : "from the save '" + state.at().name() + "'";
  return "was killed in " + epoch + " and started again " + rows;
}

// Throws an Error of the kind "ServerSetError" if the servers are not all servers of one set, in one epoch.
inline void check_one_epoch(const std::string& table, const Connections& connections, const std::vector<pb::DescribeReply>& states) {
  const auto fail = [&](size_t server, const std::string& message) {
    throw Error("ServerSetError", connections[server]->address(), table, message);
  };
  const std::string all = joined(connections, ", ");
  size_t odd = 0, top = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].epoch() > states[top].epoch()) top = i;
    if (!states[i].set().empty() && !states[odd].set().empty() && states[i].set() != states[odd].set())
      fail(i, "the servers belong to different sets: " + all + "; name the servers of one set");
    if (!states[i].set().empty()) odd = i;
  }
  if (!states[odd].set().empty() && states[odd].members() != states.size())
    fail(odd, "the set of the server " + connections[odd]->address() + " has " + std::to_string(states[odd].members()) + " servers, and " +
                  std::to_string(states.size()) + " are named: " + all + "; name all servers of the set");
  std::string text;
  size_t out = states.size();
  for (size_t i = 0; i < states.size(); ++i) {
    text += (i == 0 ? "" : "; ") + connections[i]->address() + " " + state_of(states[i]);
    if (out == states.size() && (!states[i].live() || states[i].epoch() != states[top].epoch())) out = i;
  }
  if (out < states.size()) {
    const std::string named = joined(connections, ",");
    fail(out, "the servers are in no common epoch: " + text + ". A client in Python begins one if no rows are lost. Otherwise recstore servers restore SAVE " +
                  named + " brings all of them to a save, and recstore servers reset " + named + " lets all of them begin without rows");
  }
  std::set<uint32_t> members;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& slots = states[i].slots();
    if (!members.insert(states[i].member()).second) fail(i, "two of the addresses are of the same server: " + all);
    const bool fit = !slots.empty() && std::equal(slots.begin(), slots.end(), states[0].slots().begin(), states[0].slots().end()) &&
                     states[i].member() < states.size() && *std::max_element(slots.begin(), slots.end()) < states.size();
    if (!fit) fail(i, "the server " + connections[i]->address() + " has another map of slots than the other servers");
  }
}

}  // namespace recstore::detail
