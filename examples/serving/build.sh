#!/bin/sh
# Builds main.cpp against the libtorch in Python's torch package: build.sh OUTPUT [more flags for the compiler]
set -eu
torch=$("${PYTHON:-python}" -c 'import torch; print(torch.__path__[0])')
output=$1
shift
# torch's libraries stay linked though nothing names them all: FBGEMM's are loaded later and look for them.
"${CXX:-g++}" -std=c++20 -DAT_PER_OPERATOR_HEADERS -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
    "$@" "$(dirname "$0")/main.cpp" -o "$output" \
    -L"$torch/lib" -Wl,-rpath,"$torch/lib" -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -ldl
