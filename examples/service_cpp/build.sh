#!/bin/sh
# Builds a program with the header of torchrec_recstore: build.sh OUTPUT [SOURCE.cpp] [more flags for the compiler]
#
# It needs gRPC and protobuf for C++. On Debian and Ubuntu:
#   apt-get install pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
set -eu
here=$(cd "$(dirname "$0")" && pwd)
include=$("${PYTHON:-python}" -c 'import torchrec_recstore; print(torchrec_recstore.get_include())')
output=$1
shift
source=$here/main.cpp
case "${1:-}" in *.cpp)
    source=$1
    shift
    ;;
esac
# The code that protoc generates fits the installed protobuf only, so it is generated here.
generated=$(mktemp -d)
trap 'rm -rf "$generated"' EXIT
protoc -I "$include/../wire" --cpp_out="$generated" --grpc_out="$generated" \
    --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" recstore.proto
"${CXX:-g++}" -std=c++17 -O2 -I "$include" -I "$generated" "$@" "$source" "$generated"/*.cc -o "$output" \
    -pthread -Wl,--as-needed $(pkg-config --cflags --libs grpc++ protobuf)
