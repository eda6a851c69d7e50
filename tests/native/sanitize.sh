#!/usr/bin/env bash
# Builds the core with each sanitizer, ranks as threads of one process, and runs the stress test.
#   tests/native/sanitize.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-20}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx=${CXX:-g++}
core="channel pipe control recorder heap segment stream dispatch"
for sanitizer in thread address undefined; do
  # ThreadSanitizer does not model fences; none of ours orders data, only wake-ups and the record.
  flags="-std=c++20 -O1 -g -fsanitize=$sanitizer -fno-sanitize-recover=all -Wno-tsan -Inative"
  $cxx $flags -ffp-contract=off -DBIREME_ISA=baseline -c native/kernels.cpp -o "$out/kernels.o"
  objects="$out/kernels.o"
  for part in $core; do
    $cxx $flags -DBIREME_BASELINE_ONLY -c "native/$part.cpp" -o "$out/$part.o"
    objects="$objects $out/$part.o"
  done
  $cxx $flags tests/native/stress.cpp $objects -o "$out/stress" -lpthread
  for ranks in 1 2 3 4; do
    echo "$sanitizer: $("$out/stress" "$ranks" "$rounds" "$ranks")"
  done
done
