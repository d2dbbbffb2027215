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

// The label of the last epoch of a server, and its last run. See recstore.proto.
inline std::string label_of(const pb::DescribeReply& state) {
  return state.set() + "/" + std::to_string(state.epoch()) + (state.token().empty() ? "" : "/" + state.token());
}

inline std::string run_of(const pb::DescribeReply& state, uint32_t member) {
  return static_cast<int>(member) < state.runs_size() ? state.runs(static_cast<int>(member)) : "";
}

inline std::string run_of(const pb::DescribeReply& state) { return run_of(state, state.member()); }

// Whether a server has the rows of its epoch.
inline bool is_there(const pb::DescribeReply& state) { return state.live() || state.waits(); }

// Whether two names are of the same run of a server. Servers of earlier releases call the first run by the token.
inline bool is_same_run(const pb::DescribeReply& state, const std::string& one, const std::string& other) {
  const std::string first = state.token() + "-" + std::to_string(state.member());
  return one == other || (one == state.token() && other == first) || (one == first && other == state.token());
}

// Whether a server waits whose last run is not the one that the others in its epoch know. They may know its next run.
inline bool is_rolled_back(const pb::DescribeReply& state, const std::vector<pb::DescribeReply>& states) {
  return state.waits() && std::any_of(states.begin(), states.end(), [&](const pb::DescribeReply& other) {
           if (!is_there(other) || label_of(other) != label_of(state)) return false;
           const std::string known = run_of(other, state.member());
           return !is_same_run(state, known, run_of(state)) && known != state.next();
         });
}

// Whether a server has lost a run that a client knows, because it began again from an older stop.
inline bool has_lost(const pb::DescribeReply& state, const std::string& label, const std::string& run) {
  const auto& earlier = state.earlier();
  return label_of(state) == label && run != run_of(state) && run != state.next() &&
         std::find(earlier.begin(), earlier.end(), run) == earlier.end();
}

inline std::string state_of(const pb::DescribeReply& state, const std::vector<pb::DescribeReply>& states) {
  const std::string epoch = "epoch " + std::to_string(state.epoch());
  if (state.set().empty()) {
    return state.at().name().empty() ? "is empty" : "is in no set and has the save '" + state.at().name() + "'";
  }
  if (is_rolled_back(state, states)) {
    return "has older rows of " + epoch + " than before: its data directory was rolled back, or is a copy";
  }
  if (state.live()) return "is in " + epoch;
  if (state.waits()) return "was stopped in " + epoch + " and started again";
  const std::string rows = state.at().name().empty() ? "without rows" : "from the save '" + state.at().name() + "'";
  return "was killed in " + epoch + " and started again " + rows;
}

// Throws an Error of the kind "ServerSetError" if the servers are not all servers of one set, in one epoch. Some may
// wait.
inline void check_one_epoch(const std::string& table, const Connections& connections,
                            const std::vector<pb::DescribeReply>& states) {
  const auto fail = [&](size_t server, const std::string& message) {
    throw Error("ServerSetError", connections[server]->address(), table, message);
  };
  const std::string all = joined(connections, ", ");
  size_t odd = 0, top = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].epoch() > states[top].epoch()) top = i;
    if (!states[i].set().empty() && !states[odd].set().empty() && states[i].set() != states[odd].set()) {
      fail(i, "the servers belong to different sets: " + all + "; name the servers of one set");
    }
    if (!states[i].set().empty()) odd = i;
  }
  if (!states[odd].set().empty() && states[odd].members() != states.size()) {
    fail(odd, "the set of the server " + connections[odd]->address() + " has " + std::to_string(states[odd].members()) +
                  " servers, and " + std::to_string(states.size()) + " are named: " + all +
                  "; name all servers of the set");
  }
  std::string text;
  size_t out = states.size();
  for (size_t i = 0; i < states.size(); ++i) {
    text += (i == 0 ? "" : "; ") + connections[i]->address() + " " + state_of(states[i], states);
    const bool in =
        is_there(states[i]) && label_of(states[i]) == label_of(states[top]) && !is_rolled_back(states[i], states);
    if (out == states.size() && !in) out = i;
  }
  if (out < states.size()) {
    const std::string named = joined(connections, ",");
    fail(out, "the servers are in no common epoch: " + text +
                  ". A client in Python begins one if no rows are lost. Otherwise recstore servers restore SAVE " +
                  named + " brings all of them to a save, and recstore servers reset " + named +
                  " lets all of them begin without rows");
  }
  std::set<uint32_t> members;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& slots = states[i].slots();
    if (!members.insert(states[i].member()).second) fail(i, "two of the addresses are of the same server: " + all);
    const bool fit =
        !slots.empty() && std::equal(slots.begin(), slots.end(), states[0].slots().begin(), states[0].slots().end()) &&
        states[i].member() < states.size() && *std::max_element(slots.begin(), slots.end()) < states.size();
    if (!fit) fail(i, "the server " + connections[i]->address() + " has another map of slots than the other servers");
  }
}

}  // namespace recstore::detail
