# An anchor for rehearsals of compare.sh, on CPUs too: this project without its kernels, under Megatron-LM's flags.
anchor() { # NAME GPUS FLAGS...
  name=$1 gpus=$2
  shift 2
  log=${OUT:-.}/$name.log
  PYTHONPATH=$root timeout "${LIMIT:-120}" python3 -m torch.distributed.run --standalone --nproc_per_node "$gpus" \
    "$root/pretrain_gpt.py" --transformer-impl local --tokenizer-type NullTokenizer --mock-data --lr 1e-4 --eval-iters 0 \
    --train-iters "${ITERS:-14}" --log-throughput --num-workers 0 "$@" > "$log" 2>&1
  echo "anchor $name: exit $?"
}
