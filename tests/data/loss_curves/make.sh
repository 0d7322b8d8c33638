#!/usr/bin/env bash
# Makes the curves of this folder: bash tests/data/loss_curves/make.sh FOLDER
# Trains tiny models on the sources of Python, on a CPU, and copies the losses of each run to a small file beside this
# script. Takes about ten minutes on two cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
work=${1:?folder for data and runs}
mkdir -p "$work"
PYTHON=${PYTHON:-python}
if [ ! -f "$work/code_text_document.bin" ]; then
  "$PYTHON" - "$work" "$root" <<'PY'
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tools.quickstart import python_sources, split_corpus
split_corpus(python_sources(), Path(sys.argv[1]), 2_500_000)
PY
  "$PYTHON" "$root/tools/train_tokenizer.py" --input "$work/train.jsonl" --vocab-size 2048 --output-dir "$work/tokenizer"
  "$PYTHON" "$root/tools/preprocess_data.py" --input "$work/train.jsonl" --output-prefix "$work/code" \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$work/tokenizer/vocab.json" \
    --merge-file "$work/tokenizer/merges.txt" --append-eod --workers 1
fi
model="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0"
data="--data-path $work/code_text_document --split 1 --tokenizer-type GPT2BPETokenizer
  --vocab-file $work/tokenizer/vocab.json --merge-file $work/tokenizer/merges.txt"
run="--micro-batch-size 8 --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --lr-decay-style cosine --train-iters 400
  --eval-iters 0 --log-interval 50"

train() { # NAME FLAGS: --fault changes what is trained
  name=$1; shift
  [ -f "$work/$name.metrics.jsonl" ] && return
  "$PYTHON" "$root/tests/support/broken_training.py" $model $data $run --metrics-path "$work/$name.part" "$@"
  mv "$work/$name.part" "$work/$name.metrics.jsonl"
}

train good-cosine
train good-constant --lr-decay-style constant --lr 2e-3
train good-wsd --lr-decay-style WSD --lr-wsd-decay-iters 80 --lr-wsd-decay-style linear --lr 3e-3 --min-lr 0
train good-experts --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01
train good-ramp --rampup-batch-size 2 2 800 --micro-batch-size 2 --global-batch-size 8 --lr 2e-3
train flat-rate --lr 1e-7 --min-lr 0
train flat-frozen --fault no-gradient
train slow-rate --lr 1e-5 --min-lr 1e-6
train flat-after --fault no-gradient --fault-from 120 --weight-decay 0 --lr-decay-style constant
train spikes --fault random-batches --fault-iterations 90 91 150 151 230 231 290 291 292 350 351
train high-rate --lr 0.3 --clip-grad 0 --lr-decay-style constant
train rising-rate --lr 0.2 --clip-grad 0 --lr-warmup-iters 399
train shuffled-labels --fault shuffled-labels
"$PYTHON" - "$work" "$here" "$root" <<'PY'
import json, sys
from pathlib import Path
work, here, root = map(Path, sys.argv[1:])
sys.path.insert(0, str(root))
from megatron.diagnosis.gates.unigram import facts_of_blend
facts = facts_of_blend(([str(work / "code_text_document")], None))
content = {"vocabulary": facts.vocabulary, "unigram entropy": facts.unigram}
(here / "data.json").write_text(json.dumps(content) + "\n")
kept = ("iteration", "lm loss", "non_finite", "learning rate")

def short(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value

for path in sorted(work.glob("*.metrics.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [{name: short(line[name]) for name in kept if name in line} for line in lines if "learning rate" in line]
    text = "".join(json.dumps(step) + "\n" for step in steps)
    (here / path.name.replace(".metrics", "")).write_text(text)
PY
