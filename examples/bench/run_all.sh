#!/usr/bin/env bash
# Measure every figure of the README's tables and keep the raw JSON in examples/bench/results/.
#
#   examples/bench/run_all.sh MODELS [PART...]
#
# MODELS   a folder for the models (about 16 GB; made on first use)
# PART     models compare prefill law interleaved memory overhead bench plan policies trace
#          (default: all of these)
#          gate (18 GB of scratch in MODELS, 20 min), gguf (after mbolt-gguf build-llama, 25 min)
#
# PYTHON        python with mbolt-mlx's dependencies (default: python)
# RIVAL_PYTHON  python with mlx-vlm 0.7.10 (see rival_mlxvlm.py); without it that part is left out
# PAIRS         rounds of what depends on the drive (default: 7)
#
# Linux, root (control groups), two quiet cores, 10 GB of memory. "memory" does not need quiet.
# With two cores of 2.4 GHz and a drive of 1 GB/s it takes about: models 2 min, compare 14, prefill
# 12, law 9, interleaved 3, memory 8, overhead 3, bench 4, plan 8, policies 6, trace 6. A part that
# misses its target is reported at the end and the exit status is then 1.
set -uo pipefail

models=${1:?"usage: run_all.sh MODELS [PART...]"}
shift
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 2
python=${PYTHON:-python}
rival=${RIVAL_PYTHON:-}
pairs=${PAIRS:-7}
results=examples/bench/results
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
missed=()

run() {
  echo "== $*" >&2
  local start=$SECONDS
  "$python" "$@" || missed+=("$*")
  echo "== $((SECONDS - start)) s" >&2
}

part_models() {
  for spec in f32:bench:none q8:bench:affine8 scale64:scale64:none scale512:scale512:none; do
    IFS=: read -r name preset mode <<<"$spec"
    [ -e "$models/$name/config.json" ] || run examples/bench/make_model.py "$models/$name" \
      --preset "$preset" --mode "$mode" --emb-scale 10
  done
}

compare() { # prompt, decoded, options
  local prompt=$1 decode=$2
  shift 2
  local against=(--against mlx-vlm --rival-python "$rival")
  [ -n "$rival" ] || against=(--against mlx-lm --with-stock 0)
  run examples/bench/compare.py --model "$models/f32" --pairs "$pairs" --prefill "$prompt" \
    --decode "$decode" --with-stock 3 "${against[@]}" "$@"
}

newest() { # the result of a comparison: drive, prompt
  ls -t $results/compare-*-f32-"$1"-"$2".json 2>/dev/null | head -1
}

part_compare() {
  compare 32 32
  compare 32 32 --read-mbps 400
  for drive in bare 400mbps; do
    file=$(newest $drive 32)
    run examples/bench/limit.py --model "$models/f32" --from "$file"
    run examples/bench/prefill.py --model "$models/f32" --from "$file"
  done
}

part_prefill() {
  compare 300 1 --read-mbps 400
  run examples/bench/prefill.py --model "$models/f32" --from "$(newest 400mbps 300)"
}

part_law() {
  run examples/bench/speed_law.py --model "$models/q8" --pairs "$pairs" --engine-pairs "$pairs" \
    --prefill 16 --decode 16 --memory none
}

part_interleaved() {
  run examples/bench/interleaved_stock.py --model "$models/f32"
}

part_memory() {
  run examples/bench/memory.py --model "$models/f32" --memory 1300M
}

part_overhead() {
  run examples/bench/overhead.py --models "$models" --pairs "$pairs"
}

part_bench() {
  run -m mbolt_mlx.cli.main bench --model "$models/q8" --resident 0.2,0.5,1.0 --baseline \
    --side-file "$models/q8-side/experts.safetensors" --cold --direct --prefill 32 --decode 32 \
    --json $results/bench-q8.json
}

part_plan() {
  run examples/bench/plan_check.py --models "$models"
}

part_policies() {
  run examples/bench/policy_speed.py --model "$models/f32" --read-mbps 400
}

part_trace() {
  run examples/bench/trace_cost.py --models demo "$models/q8"
}

part_gate() {
  for name in qwen3-30b gpt-oss; do
    run examples/bench/gate.py $name --scratch "$models" --read-mbps 400
    run examples/bench/gate.py $name --scratch "$models" --read-iops 2000
    run examples/bench/gate.py $name --scratch "$models"
  done
}

part_gguf() {
  run examples/bench/gguf_prefetch.py --models "$models" --modes willneed --decode 32
}

[ $# -gt 0 ] || set -- models compare prefill law interleaved memory overhead bench plan policies trace
for part in "$@"; do
  declare -F "part_$part" >/dev/null || { echo "run_all.sh: no part $part" >&2; exit 2; }
done
mkdir -p "$models" $results
for part in "$@"; do
  "part_$part"
done
for command in ${missed[@]+"${missed[@]}"}; do
  echo "run_all.sh: not as it should be: $command" >&2
done
[ ${#missed[@]} -eq 0 ]
