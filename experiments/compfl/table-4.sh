#!/usr/bin/env bash
# CompFL's Table 4 in small, three seeds: rounds and megabytes to a target accuracy, from scratch and from experts
# that were trained on images that no client has. The same command again goes on where it was stopped.
#
#     experiments/compfl/table-4.sh DIR [FOLDER]     # DIR has CIFAR-10, as --data-dir; results in FOLDER, runs/table-4
set -euo pipefail
cd "$(dirname "$0")/../.."
data=$1 out=${2:-runs/table-4}
clients=(local fedavg-ft compfl @experiments/compfl/table4.args --seeds 3 --data-dir "$data")

jaxfl compare "${clients[@]}" --run-dir "$out/scratch"
for expert in lenet5 cifar_small; do
  jaxfl compare local @experiments/compfl/expert.args --data-dir "$data" --models "$expert" \
    --disjoint-from "$out/scratch/local/seed-0/partition.npz" --run-dir "$out/$expert"
done
jaxfl compare "${clients[@]}" --init-from "$out"/{lenet5,cifar_small}/local/seed-0 --run-dir "$out/pretrained"
jaxfl report "$out/scratch" "$out/pretrained" --target 0.4 0.6
