#!/usr/bin/env bash
# The fine-tuning tour: a small model of your own learns to answer, on a CPU, in about a minute on an idle machine.
#
#     examples/fine_tune.sh [FOLDER]        # default: runs/fine-tune
#
# Needs Transformers to make the model, and to read the result without Paceline:
#
#     . .venv/bin/activate && pip install -c constraints.txt transformers
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/fine-tune}
python=python
if [ -x .venv/bin/python ]; then
    python=.venv/bin/python
fi
python=${PACELINE_PYTHON:-$python}
paceline() { "$python" -m paceline "$@"; }
say() { printf '\n== %s\n' "$*"; }
rows=examples/fine_tune/capitals.jsonl
has() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }
if ! has paceline; then
    echo "error: $python has no Paceline." >&2
    echo "  Run scripts/demo, which makes .venv, or set PACELINE_PYTHON to a Python that has it." >&2
    exit 1
fi
if ! has transformers; then
    echo "error: $python has no Transformers, which makes the model of this tour and reads its result." >&2
    echo "  Install it: $python -m pip install -c constraints.txt transformers" >&2
    exit 1
fi
question="What is the capital of Japan?"

say "1. a model: random weights, a tokenizer, a chat template"
"$python" examples/fine_tune/make_model.py "$folder/base" "$rows"

say "2. the data, as the model will learn it"
paceline data inspect "$rows" --task sft --tokenizer "$folder/base"

say "3. LoRA"
paceline train examples/fine_tune/recipe.toml --set run.dir="$folder/run" --set model.init_from="$folder/base"

say "4. a sample, before and after"
ask() { paceline generate "$1" --chat --prompt "$question" --temperature 0 --max-tokens 40 "${@:2}"; }
echo "before: $(ask "$folder/base" | tr '\n' ' ')"
trained=$(ask "$folder/run")
echo "after:  $trained"

say "5. merged, as a Hugging Face folder"
paceline convert "$folder/run" "$folder/merged"
adapter=$(find "$folder/run/exports" -name adapter_config.json -printf '%h\n' | sort | tail -n 1)
merged=$(ask "$folder/merged")
beside=$(ask "$folder/base" --adapter "$adapter")
theirs=$("$python" examples/fine_tune/ask.py "$folder/merged" "$question")

say "6. the same text, four ways"
printf '%-44s %s\n' \
    "the run" "$trained" \
    "the merged folder" "$merged" \
    "the base with the adapter ($(basename "$adapter"))" "$beside" \
    "the merged folder, by Transformers" "$theirs"
for text in "$merged" "$beside" "$theirs"; do
    if [ "$text" != "$trained" ]; then
        echo "not the same: $text" >&2
        exit 1
    fi
done
