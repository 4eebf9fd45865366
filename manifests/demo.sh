#!/bin/sh
# Every stage on a drawn dataset and a tiny model, with the commands that a user types: `sh manifests/demo.sh DIR`.
# Run it again to continue where it stopped.
set -eu
dir=${1:-demo}
say() { printf '\n$ %s\n' "$*"; "$@"; }

[ -f "$dir/dataset.toml" ] || say prep demo "$dir"
cd "$dir"

# A scan that finds errors exits 1; the demo has some broken files on purpose.
say prep scan photos || [ $? -eq 1 ]
say prep bucket dataset.toml --batch-size 8
say prep mask photos --with alpha -o masks
say prep encode dataset.toml --mask masks --embed vision --cache cache -o demo.json
say prep embed dataset.toml --model vision --cache cache
say prep inspect demo.json
say prep inspect demo.json --html report.html
say prep verify demo.json
say train check demo.json -c train.toml
if [ ! -f run/lora.safetensors ]; then
    # --resume needs a checkpoint; without one, the run starts again.
    if ls run/checkpoints/step-* >/dev/null 2>&1; then
        say train run demo.json -c train.toml -o run --resume
    else
        say train run demo.json -c train.toml -o run
    fi
fi
say train evaluate run --seeds 2 --html checkpoints.html
say train sample run --compare -o grid.png

printf '\nmanifest     %s/demo.json\nLoRA         %s/run/lora.safetensors\nHTML report  %s/report.html\ncheckpoints  %s/checkpoints.html\n' \
    "$dir" "$dir" "$dir" "$dir"
printf 'pictures     %s/grid.png: each prompt before and after training; red hearts were new to the model\n' "$dir"
