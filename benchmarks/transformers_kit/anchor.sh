# An anchor for compare.sh: Llama of Hugging Face's transformers with torch.compile, SDPA and fused AdamW, on one GPU.
anchor() { # NAME GPUS FLAGS...
  name=$1
  shift 2
  log=${OUT:-.}/$name.log
  timeout "${LIMIT:-120}" python3 "$root/benchmarks/transformers_kit/train.py" --train-iters "${ITERS:-20}" "$@" \
    > "$log" 2>&1
  echo "anchor $name: exit $?"
}
